"""Letters in matplotlib's font files, grouped into visually distinct classes.

Characters that most faces draw alike are one class, such as Latin A, Greek Alpha and Cyrillic A.
"""

import collections
import functools
import pathlib
import unicodedata
from typing import NamedTuple

import fontTools.ttLib
import fontTools.unicodedata
import matplotlib
import numpy as np
import scipy.sparse.csgraph
from PIL import Image, ImageDraw, ImageFont

SIZE = 48  # Side of an image in pixels.
SUPERSAMPLE = 3  # Glyphs are drawn at this multiple of the size, then averaged down.
EM = 30  # Font size; the same for every letter, so that c and C remain distinct.
BASELINE = 35  # Row of the baseline; leaves room for two accents above and a cedilla below.
MARGIN = 3  # Distance from the border in pixels; larger glyphs are shrunk.

MIN_FACES = 10  # Characters in fewer faces are left out.

# Without modifier letters (Lm), which are tiny accents or superscripts of other letters.
LETTER_CATEGORIES = frozenset({"Lu", "Ll", "Lt", "Lo"})

# Faces whose character maps assign other shapes to code points of letters.
MISMAPPED_FACES = {
    "LastResortHE-Regular",  # One placeholder box per block of Unicode.
    "cmex10",  # Brackets, integrals and radicals at code points of letters.
    "cmsy10",  # Arrows and relations at a-z; calligraphic capitals at A-Z.
}
# Other Computer Modern faces are correct only for A-Z and a-z: their TeX encoding has AE at U+00C0.
ASCII_ONLY_PREFIX = "cm"
# Wrong glyphs of single faces: this face swaps che with descender and ghe with descender.
MISMAPPED_GLYPHS = {"DejaVuSansMono-Oblique": frozenset({0x04CB, 0x04CC, 0x04F6, 0x04F7})}

# Two drawings are alike if their squared difference is at most this fraction of the larger one's
# squared ink: redrawn copies of a letter (STIX Alpha and A) are below 0.01, the closest letters
# that should differ (O with breve, O with caron) above 0.014 in the median face.
SAME_TOLERANCE = 0.01
# Characters are one class if more than this fraction of the faces with both draw them alike.
SAME_SHARE = 0.5


class Glyph(NamedTuple):
    """One character in one face."""

    face: str
    codepoint: int


class GlyphClass(NamedTuple):
    """Characters that are drawn alike, with one glyph for each face that contains any of them."""

    codepoints: tuple[int, ...]  # The characters' code points, ascending.
    glyphs: tuple[Glyph, ...]  # For each face, its character with the lowest code point.

    @property
    def name(self) -> str:
        """The first character and its Unicode name, unique among classes."""
        character = chr(self.codepoints[0])
        return f"{character} {unicodedata.name(character)}"

    @property
    def script(self) -> str:
        """Name of the script, such as 'Latin'."""
        code = fontTools.unicodedata.script(self._scripted_character)
        return fontTools.unicodedata.script_name(code)

    @property
    def base(self) -> str:
        """The letter without accents, such as 'e' for 'é'; 'ø' is a letter without accents."""
        return unicodedata.normalize("NFD", self._scripted_character)[0]

    @property
    def _scripted_character(self) -> str:
        """The first character that belongs to a script: Greek mu, not the micro sign."""
        characters = map(chr, self.codepoints)
        return min(characters, key=lambda c: fontTools.unicodedata.script(c) == "Zyyy")


def face_path(face: str) -> pathlib.Path:
    """Returns the font file of a face."""
    return pathlib.Path(matplotlib.get_data_path(), "fonts", "ttf", f"{face}.ttf")


def letters_of(face: str) -> list[int]:
    """Returns the code points of the letters that a face draws, ascending."""
    with fontTools.ttLib.TTFont(face_path(face), lazy=True) as font:
        mapped = set(font.getBestCmap()) - MISMAPPED_GLYPHS.get(face, frozenset())
    letters = [c for c in sorted(mapped) if unicodedata.category(chr(c)) in LETTER_CATEGORIES]
    return [c for c in letters if c < 128 or not face.startswith(ASCII_ONLY_PREFIX)]


@functools.cache
def _load_font(face: str) -> ImageFont.FreeTypeFont:
    layout = ImageFont.Layout.BASIC  # The same on all machines: it needs no optional library.
    return ImageFont.truetype(face_path(face), EM * SUPERSAMPLE, layout_engine=layout)


def draw(glyph: Glyph) -> Image.Image:
    """Draws a glyph on the baseline, centred, light on dark, with a side of SIZE * SUPERSAMPLE."""
    font, character = _load_font(glyph.face), chr(glyph.codepoint)
    left, top, right, bottom = font.getbbox(character, anchor="ls")
    # Pixels across, above the baseline and below it: available in the image, and required.
    available = SIZE - 2 * MARGIN, BASELINE - MARGIN, SIZE - BASELINE - MARGIN
    required = right - left, -top, bottom
    rooms = zip(available, required, strict=True)
    scale = min([1.0] + [SUPERSAMPLE * room / need for room, need in rooms if need > 0])
    if scale < 1:
        font = font.font_variant(size=font.size * scale)
        left, top, right, bottom = font.getbbox(character, anchor="ls")
    side = SIZE * SUPERSAMPLE
    canvas = Image.new("L", (side, side), 0)
    corner = ((side - left - right) // 2, BASELINE * SUPERSAMPLE)
    ImageDraw.Draw(canvas).text(corner, character, fill=255, font=font, anchor="ls")
    return canvas


def draw_small(glyph: Glyph) -> np.ndarray:
    """Draws a glyph without random changes: uint8 [SIZE, SIZE], with 255 for full ink."""
    return np.asarray(draw(glyph).reduce(SUPERSAMPLE))


@functools.cache
def glyph_classes() -> tuple[GlyphClass, ...]:
    """Returns all classes with at least MIN_FACES faces, ordered by lowest code point."""
    # Drawing and comparing all candidates takes some seconds, hence the cache.
    installed = {path.stem for path in face_path("any").parent.glob("*.ttf")}
    letters = {face: letters_of(face) for face in sorted(installed - MISMAPPED_FACES)}
    face_counts = collections.Counter(c for mapped in letters.values() for c in mapped)
    candidates = np.array(sorted(c for c, count in face_counts.items() if count >= MIN_FACES))
    drawn_by_face, are_alike = _compare_candidates(candidates, letters)
    _, class_of = scipy.sparse.csgraph.connected_components(are_alike, directed=False)
    classes = []
    for number in dict.fromkeys(class_of):
        codepoints = candidates[class_of == number].tolist()
        present = {face: drawn.intersection(codepoints) for face, drawn in drawn_by_face.items()}
        glyphs = tuple(Glyph(face, min(drawn)) for face, drawn in present.items() if drawn)
        if len(glyphs) >= MIN_FACES:
            classes.append(GlyphClass(tuple(codepoints), glyphs))
    return tuple(classes)


def _compare_candidates(
    candidates: np.ndarray, letters: dict[str, list[int]]
) -> tuple[dict[str, set[int]], np.ndarray]:
    """Returns the candidates that each face draws, and which pairs, bool [N, N], are one letter."""
    drawn_by_face = {}
    both_drawn = np.zeros((len(candidates),) * 2, np.int32)  # Numbers of faces that draw both.
    alike = np.zeros_like(both_drawn)  # Numbers of faces that draw both alike.
    for face, mapped in letters.items():
        rows = np.flatnonzero(np.isin(candidates, mapped))
        if not len(rows):
            continue
        images = np.stack([draw_small(Glyph(face, c)) for c in candidates[rows].tolist()])
        notdef = draw_small(Glyph(face, 0xFFFF))  # The face's glyph for missing characters.
        drawn = images.any(axis=(1, 2)) & (images != notdef).any(axis=(1, 2))
        rows, images = rows[drawn], images[drawn]
        drawn_by_face[face] = set(candidates[rows].tolist())
        both_drawn[np.ix_(rows, rows)] += 1
        difference, larger_ink = squared_differences(images)
        alike[np.ix_(rows, rows)] += difference <= SAME_TOLERANCE * larger_ink
    normal = np.array([unicodedata.normalize("NFC", chr(c)) for c in candidates])
    equivalent = normal[:, None] == normal  # Such as the angstrom sign and Å.
    return drawn_by_face, (alike > SAME_SHARE * both_drawn) | equivalent


def squared_differences(images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Squared differences [N, N] of drawings [N, side, side], and the larger squared ink [N, N]."""
    # With six bits of ink, all sums of products are below 2**24, up to which float32 is exact. So
    # the classes do not depend on the order of summation.
    ink = (images.reshape(len(images), -1) >> 2).astype(np.float32)
    products = ink @ ink.T
    squares = np.diagonal(products)
    difference = squares[:, None] + squares - 2 * products
    return difference, np.maximum(squares[:, None], squares)
