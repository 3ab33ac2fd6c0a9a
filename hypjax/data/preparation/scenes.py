"""Scenes: a built-in dataset of particular objects, like Revisited Oxford and Paris.

An object is a letter in one of two faces, shown in many pictures: on clutter, tilted, blurred, or
partly covered. Each query has a box, and a ground truth of easy, hard and junk images in the
gallery. On other kinds of machines, rounding in the perspective might change single pixels.
"""

import itertools
import zlib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import pyarrow
from jaxtyping import Bool, Float, Float32, UInt8
from PIL import Image, ImageDraw, ImageFilter

from hypjax.data import records
from hypjax.data.preparation import fonts
from hypjax.data.preparation.glyphs import example
from hypjax.data.records import Contents, Example

SIDE = 64  # Side of a picture in pixels.
SEED = 20240301

# Numbers of letters by the role of their objects; each letter is two objects.
LETTERS = {"train": 300, "query": 35, "distractor": 150}
# Numbers of views of an object, by difficulty.
TRAIN_VIEWS = {"easy": 5, "hard": 5}
GALLERY_VIEWS = {"easy": 5, "hard": 5, "junk": 2}

FACES_COMPARED = 6  # The two faces of a letter are the least alike among this number of faces.
# Letters are too alike if, both scaled to a square of _SHAPE pixels, their squared difference is at
# most this fraction of the larger one's squared ink, such as c and C in one face.
ALIKE, _SHAPE = 0.2, 32

HARD_EFFECTS = ("blur", "cover", "fade")
FURTHER_EFFECT = 0.15  # Probability of each further effect in a hard view, which has one for sure.
BLUR = (0.7, 1.2)  # Standard deviation, in pixels.
COVERED = (0.2, 0.4)  # Fraction of the object's box under a bar.
GROUND = (0, 40)  # Mean grey of the background.
FADED, CONTRAST = (60, 90), (150, 210)  # Differences between the greys of ink and background.
JUNK_SHOWN = (0.05, 0.2)  # Visible fraction of a junk object's ink, rounded down to whole pixels.
NOISE = 4.0  # Standard deviation, on the scale of 0 to 255.
EDGE = 0.1  # Pixels with more than this fraction of ink belong to the object.

_SUPERSAMPLE = 2  # Pictures are drawn at this multiple of the side, then averaged down.
_CANVAS = (SIDE * _SUPERSAMPLE, SIDE * _SUPERSAMPLE)
_FRAGMENT_FACES = ("DejaVuSans", "DejaVuSerif-Italic", "STIXGeneralBol", "cmr10")

Grey = Float32[np.ndarray, "side side"]
Mask = Bool[np.ndarray, "side side"]
Box = tuple[int, int, int, int]  # Left, top, right and bottom; the last two are excluded.


class Limits(NamedTuple):
    """Limits of the random changes in views of one difficulty."""

    size: tuple[float, float]  # Side of the letter's canvas, relative to the picture.
    rotation: float  # Largest rotation to either side, in degrees.
    perspective: float  # Displacement of the canvas's corners, relative to its side.
    shapes: tuple[int, int]  # Number in the background; fragments of letters: half as many.
    clutter: float  # Largest difference between the greys of shapes and background.


_HARD = Limits((0.75, 0.95), rotation=15, perspective=0.1, shapes=(6, 12), clutter=40)
DIFFICULTIES = {
    "query": Limits((0.70, 0.85), rotation=3, perspective=0.01, shapes=(2, 4), clutter=20),
    "easy": Limits((0.90, 1.00), rotation=6, perspective=0.04, shapes=(3, 6), clutter=30),
    "hard": _HARD,
    "junk": _HARD,
}


def _round(pixels: Float[np.ndarray, "height width"]) -> UInt8[np.ndarray, "height width"]:
    return np.rint(np.clip(pixels, 0, 255)).astype(np.uint8)


def _smooth(rng: np.random.Generator, grey: float, amplitude: float) -> Grey:
    """Draws smooth noise about a mean grey."""
    coarse = Image.fromarray(_round(grey + rng.uniform(-amplitude, amplitude, (5, 5))))
    return np.asarray(coarse.resize((SIDE, SIDE), Image.Resampling.BICUBIC), np.float32)


def _background(rng: np.random.Generator, ground: float, limits: Limits) -> Grey:
    """Draws smooth noise with lines, rectangles, ellipses and fragments of letters."""
    canvas = Image.fromarray(_round(_smooth(rng, ground, limits.clutter / 2))).resize(_CANVAS)
    draw = ImageDraw.Draw(canvas)
    num_shapes = int(rng.integers(*limits.shapes, endpoint=True))
    shades = np.rint(ground + rng.uniform(-1, 1, num_shapes) * limits.clutter).astype(int).tolist()
    for shade in shades:
        x, y = rng.uniform(-0.1, 1, 2) * _CANVAS
        width, height = rng.uniform(0.1, 0.5, 2) * _CANVAS
        match rng.integers(3):
            case 0:
                draw.rectangle((x, y, x + width, y + height), shade)
            case 1:
                draw.ellipse((x, y, x + width, y + height), shade)
            case _:
                ends = (x, y, x + rng.choice((-2, 2)) * width, y + 2 * height)
                draw.line(ends, shade, width=int(rng.integers(2, 7)))
    for shade in shades[: num_shapes // 2]:
        fragment = _fragment(rng)
        corner = tuple(rng.integers(-8, _CANVAS[0] - 8, 2).tolist())
        # The opposite shade, since a shape may already be there in this one.
        canvas.paste(Image.new("L", fragment.size, round(2 * ground) - shade), corner, fragment)
    return np.asarray(canvas.reduce(_SUPERSAMPLE), np.float32)


def _fragment(rng: np.random.Generator) -> Image.Image:
    """Draws a quarter of a random letter from a to z, resized at random."""
    face = _FRAGMENT_FACES[rng.integers(len(_FRAGMENT_FACES))]
    drawn = fonts.draw(fonts.Glyph(face, int(rng.integers(ord("a"), ord("z"), endpoint=True))))
    drawn = drawn.crop(drawn.getbbox())
    half = np.array(drawn.size) // 2
    x, y = rng.integers(0, half, endpoint=True).tolist()
    quarter = drawn.crop((x, y, x + int(half[0]), y + int(half[1])))
    return quarter.resize(rng.integers(12, 30, 2).tolist())


def _place(rng: np.random.Generator, drawn: Image.Image, limits: Limits) -> tuple[Grey, Box]:
    """Puts a letter into a picture, rotated and in perspective; returns ink and canvas box."""
    side = drawn.width
    corners = np.array([(0, 0), (side, 0), (side, side), (0, side)], float)
    placed = corners + rng.uniform(-1, 1, (4, 2)) * limits.perspective * side
    angle = np.deg2rad(rng.uniform(-limits.rotation, limits.rotation))
    rotation = np.array([(np.cos(angle), np.sin(angle)), (-np.sin(angle), np.cos(angle))])
    placed = placed @ rotation * (rng.uniform(*limits.size) * _CANVAS[0] / side)
    room = np.array(_CANVAS) - np.ptp(placed, axis=0)
    placed += rng.uniform(0.1, 0.9, 2) * room - placed.min(axis=0)
    # Pillow's eight coefficients map points (x, y) of the result to points (u, v) of the drawing.
    (x, y), (u, v), ones, zeros = placed.T, corners.T, np.ones(4), np.zeros((4, 3))
    u_equations = np.column_stack([x, y, ones, zeros, -u * x, -u * y])
    v_equations = np.column_stack([zeros, x, y, ones, -v * x, -v * y])
    equations = np.concatenate([u_equations, v_equations])
    coefficients = np.linalg.solve(equations, np.concatenate([u, v])).tolist()
    perspective = Image.Transform.PERSPECTIVE
    result = drawn.transform(_CANVAS, perspective, coefficients, Image.Resampling.BILINEAR)
    ends = np.clip(np.rint([placed.min(axis=0), placed.max(axis=0)]) / _SUPERSAMPLE, 0, SIDE)
    box = tuple(np.rint(ends).astype(int).ravel().tolist())
    return np.asarray(result.reduce(_SUPERSAMPLE), np.float32) / 255, box


def _ink_box(ink: Grey) -> Box:
    return Image.fromarray(ink > EDGE).getbbox() or (0, 0, *ink.shape)


def _bar(rng: np.random.Generator, box: Box) -> Mask:
    """Marks a vertical or horizontal bar across the picture that covers a part of the box."""
    axis = rng.integers(2)  # 0: the bar is vertical, and covers columns.
    low, high = box[axis], box[axis + 2]
    width = rng.uniform(*COVERED) * (high - low)
    start = rng.uniform(low, high - width)
    bar = np.zeros((SIDE, SIDE), bool)
    bar[:, round(start) : round(start + width)] = True
    return bar if axis == 0 else bar.T


def _hide(rng: np.random.Generator, ink: Grey) -> tuple[Grey, Mask]:
    """Moves most of the ink beyond a random border, or covers it; returns ink and cover."""
    turns = int(rng.integers(4))
    ink = np.rot90(ink, turns)
    shares = np.cumsum(ink.sum(axis=0)) / ink.sum()
    shown_columns = int(np.searchsorted(shares, rng.uniform(*JUNK_SHOWN)))
    cover = np.zeros(ink.shape, bool)
    if rng.random() < 0.5:
        ink = np.pad(ink[:, :shown_columns], ((0, 0), (SIDE - shown_columns, 0)))
    else:
        _, top, right, bottom = _ink_box(ink)
        cover[max(top - 3, 0) : bottom + 3, shown_columns : right + 3] = True
    return np.rot90(ink, -turns), np.rot90(cover, -turns)


class SceneObject(NamedTuple):
    """A letter in one face."""

    letter: fonts.GlyphClass
    glyph: fonts.Glyph

    @property
    def name(self) -> str:
        """Unique name, such as 'A LATIN CAPITAL LETTER A in DejaVuSans'."""
        return f"{self.letter.name} in {self.glyph.face}"

    def views(self, **counts: int) -> "list[View]":
        """Returns the given number of views of each difficulty."""
        return [View(self, level, i) for level, count in counts.items() for i in range(count)]


class View(NamedTuple):
    """A picture of an object that can be rendered."""

    shown: SceneObject
    difficulty: str
    number: int

    @property
    def name(self) -> str:
        """Unique name, such as 'U+0041/DejaVuSans/easy3'."""
        glyph = self.shown.glyph
        return f"U+{glyph.codepoint:04X}/{glyph.face}/{self.difficulty}{self.number}"

    def render(self) -> tuple[UInt8[np.ndarray, "side side"], Box]:
        """Renders the picture; returns its pixels, and the box of the letter's square canvas."""
        glyph, limits = self.shown.glyph, DIFFICULTIES[self.difficulty]
        # The picture depends only on the parts of the view's name.
        names = glyph.face, f"{self.difficulty}{self.number}"
        hashes = (zlib.crc32(name.encode()) for name in names)
        rng = np.random.default_rng([SEED, glyph.codepoint, *hashes])
        first = rng.choice(HARD_EFFECTS)
        hard_effects = {x for x in HARD_EFFECTS if rng.random() < FURTHER_EFFECT or x == first}
        effects = {"hard": hard_effects, "junk": {"hide"}}.get(self.difficulty, set())

        ground = rng.uniform(*GROUND)
        background = _background(rng, ground, limits)
        ink, box = _place(rng, fonts.draw(glyph), limits)
        cover = np.zeros(ink.shape, bool)
        if "hide" in effects:
            ink, cover = _hide(rng, ink)
        if "cover" in effects:
            cover = _bar(rng, _ink_box(ink))
        contrast = rng.uniform(*(FADED if "fade" in effects else CONTRAST))
        pixels = background + ink * (ground + contrast - background)
        pixels = np.where(cover, _smooth(rng, rng.uniform(30, 225), 20), pixels)
        if "blur" in effects:
            blur = ImageFilter.GaussianBlur(rng.uniform(*BLUR))
            pixels = np.asarray(Image.fromarray(_round(pixels)).filter(blur))
        pixels = _round(pixels + NOISE * rng.standard_normal(pixels.shape, np.float32))
        return pixels, box

    def example(self) -> Example:
        """Renders the picture as an example to be written."""
        return example(self.render()[0], self.name, self.shown.name, self.shown.letter.script)


def choose_objects(classes: Iterable[fonts.GlyphClass]) -> dict[str, list[SceneObject]]:
    """Chooses random letters without accents for each role, in two faces, no two alike."""
    rng = np.random.default_rng(SEED)
    letters = [letter for letter in classes if letter.base == chr(letter.codepoints[0])]
    letters = [letters[i] for i in rng.permutation(len(letters))]
    objects = [
        SceneObject(letter, glyph) for letter in letters for glyph in _two_faces(rng, letter)
    ]
    differences = _differences([scene_object.glyph for scene_object in objects])
    chosen: list[int] = []
    for i in range(0, len(objects), 2):  # Of each letter's two objects, the index of the first.
        nearest = differences[i : i + 2, chosen].min(initial=1)  # 1 if none is chosen yet.
        if min(differences[i, i + 1], nearest) > ALIKE:
            chosen += [i, i + 1]
    remaining = iter(objects[i] for i in chosen)
    return {role: [*itertools.islice(remaining, 2 * n)] for role, n in LETTERS.items()}


def _two_faces(rng: np.random.Generator, letter: fonts.GlyphClass) -> list[fonts.Glyph]:
    """Returns a letter in the two faces that are the least alike among some random faces."""
    glyphs = [letter.glyphs[i] for i in rng.permutation(len(letter.glyphs))[:FACES_COMPARED]]
    differences = _differences(glyphs)
    return [glyphs[i] for i in np.unravel_index(differences.argmax(), differences.shape)]


def _differences(glyphs: list[fonts.Glyph]) -> Float32[np.ndarray, "glyphs glyphs"]:
    """Returns squared differences of drawings, relative to the larger one's squared ink."""
    canvas = np.zeros((len(glyphs), _SHAPE, _SHAPE), np.uint8)
    for i, glyph in enumerate(glyphs):
        drawn = fonts.draw(glyph)
        drawn = drawn.crop(drawn.getbbox())
        width, height = (max(1, round(_SHAPE * n / max(drawn.size))) for n in drawn.size)
        top, left = (_SHAPE - height) // 2, (_SHAPE - width) // 2
        drawn = drawn.resize((width, height), Image.Resampling.BOX)
        canvas[i, top : top + height, left : left + width] = np.asarray(drawn)
    difference, larger = fonts.squared_differences(canvas)
    return difference / larger


def split_views(objects: Mapping[str, list[SceneObject]]) -> dict[str, list[View]]:
    """Returns the views of each split, in the order of its records."""
    train = [view for shown in objects["train"] for view in shown.views(**TRAIN_VIEWS)]
    query = [View(shown, "query", 0) for shown in objects["query"]]
    gallery = [view for shown in objects["query"] for view in shown.views(**GALLERY_VIEWS)]
    distractors = zip(objects["distractor"], itertools.cycle(("easy", "hard")), strict=False)
    gallery += [View(shown, level, 0) for shown, level in distractors]
    return {"train": train, "query": query, "gallery": gallery}


def contents() -> Contents:
    """Returns the dataset, with pairs of training images and the queries' ground truth."""
    objects = choose_objects(fonts.glyph_classes())
    splits = split_views(objects)
    examples = {name: (view.example() for view in views) for name, views in splits.items()}
    return Contents(examples, sum(map(len, splits.values())), _tables(objects))


def _tables(objects: Mapping[str, list[SceneObject]]) -> dict[str, pyarrow.Table]:
    """Lists ground truth, and pairs of an easy view and any other view of a training object."""
    pairs, judgements = [], []
    for shown in objects["train"]:
        for anchor, positive in itertools.permutations(shown.views(**TRAIN_VIEWS), 2):
            if anchor.difficulty == "easy":
                pairs.append({"anchor": anchor.name, "positive": positive.name})
    for shown in objects["query"]:
        query = View(shown, "query", 0)
        judgement: dict[str, Any] = {"query": query.name, "box": query.render()[1]}
        for view in shown.views(**GALLERY_VIEWS):
            judgement.setdefault(view.difficulty, []).append(view.name)
        judgements.append(judgement)
    return {
        records.PAIRS: pyarrow.Table.from_pylist(pairs, records.PAIRS_SCHEMA),
        records.JUDGEMENTS: pyarrow.Table.from_pylist(judgements, records.JUDGEMENTS_SCHEMA),
    }
