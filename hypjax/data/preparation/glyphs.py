"""Glyphs: a built-in dataset of letters, drawn from matplotlib's fonts.

A class is a letter, and its images are the letter in different faces. Records are reproducible.
"""

import io
import math
import zlib
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from PIL import Image

from hypjax.data.preparation import fonts
from hypjax.data.records import Contents, Example

SIZE = fonts.SIZE
SEED = 20240229
TEST_SHARE = 0.25  # Fraction of the classes.

# Limits of the random changes, which are uniform and symmetric about no change.
ROTATION = math.radians(5)
SCALE = 0.08
SHEAR = 0.05
SHIFT = 2.0  # Pixels, in each direction.
NOISE = 8.0  # Standard deviation, on the scale of 0 to 255.


def render(glyph: fonts.Glyph) -> np.ndarray:
    """Renders a glyph, light on dark, with fixed random changes: uint8 [SIZE, SIZE]."""
    rng = np.random.default_rng([SEED, glyph.codepoint, zlib.crc32(glyph.face.encode())])
    drawn = fonts.draw(glyph)
    warped = drawn.transform(
        drawn.size, Image.Transform.AFFINE, _random_affine(rng), Image.Resampling.BILINEAR
    )
    ink = np.asarray(warped.reduce(fonts.SUPERSAMPLE), np.float32)
    noisy = ink + NOISE * rng.standard_normal(ink.shape, np.float32)
    return np.rint(np.clip(noisy, 0, 255)).astype(np.uint8)


def _random_affine(rng: np.random.Generator) -> tuple[float, ...]:
    """Draws a random affine map about the canvas's centre, as the six numbers that Pillow takes."""
    angle, zoom, shear = rng.uniform(-1, 1, 3) * (ROTATION, SCALE, SHEAR)
    cos, sin = math.cos(angle), math.sin(angle)
    linear = np.array([[cos, -sin], [sin, cos]]) @ np.array([[1, shear], [0, 1]]) / (1 + zoom)
    centre = SIZE * fonts.SUPERSAMPLE / 2
    shift = rng.uniform(-SHIFT, SHIFT, 2) * fonts.SUPERSAMPLE
    offset = centre - linear @ (centre + shift)
    return (*linear[0].tolist(), float(offset[0]), *linear[1].tolist(), float(offset[1]))


def example(pixels: np.ndarray, name: str, class_name: str, coarse_label: str) -> Example:
    """Encodes a rendered image as PNG, with its names."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "png")
    height, width = pixels.shape
    return Example(file.getvalue(), height, width, name, class_name, coarse_label)


def split_classes(classes: Sequence[fonts.GlyphClass]) -> tuple[list[fonts.GlyphClass], ...]:
    """Splits classes at random, with a fixed seed, into training and test classes, in order."""
    order = np.random.default_rng(SEED).permutation(len(classes))
    test, train = np.split(order, [round(TEST_SHARE * len(classes))])
    return [classes[i] for i in np.sort(train)], [classes[i] for i in np.sort(test)]


def examples(classes: Iterable[fonts.GlyphClass]) -> Iterator[Example]:
    """Yields the examples of classes, ordered by class, then by face."""
    for glyph_class in classes:
        for glyph in glyph_class.glyphs:
            name = f"U+{glyph.codepoint:04X}/{glyph.face}"
            yield example(render(glyph), name, glyph_class.name, glyph_class.script)


def contents() -> Contents:
    """Returns the dataset; the classes of the two splits are disjoint."""
    train, test = split_classes(fonts.glyph_classes())
    total = sum(len(c.glyphs) for c in train + test)
    return Contents({"train": examples(train), "test": examples(test)}, total, {})
