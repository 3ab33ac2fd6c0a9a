"""Glyphs: a built-in retrieval dataset of letters, drawn from matplotlib's fonts.

A class is a letter, its images are the faces that contain it, and no test class occurs in training.
Nothing is downloaded. Every preparation gives the same records in the same order, though not the
same file bytes, since protobuf may write the fields of a record in any order:

    builder = Glyphs(data_dir=...)
    builder.download_and_prepare()
    source = builder.as_data_source("train", decoders={"image": tfds.decode.SkipDecoding()})
"""

import io
import math
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import tensorflow_datasets as tfds
from PIL import Image

from hypjax.data.preparation import fonts
from hypjax.data.records import Example, RecordBuilder

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
    """Renders a glyph with random changes: (SIZE, SIZE) uint8, light ink on a dark background.

    The changes depend only on the character and the name of the face.
    """
    rng = np.random.default_rng([SEED, glyph.codepoint, zlib.crc32(glyph.face.encode())])
    drawn = fonts.draw(glyph)
    changed = drawn.transform(
        drawn.size, Image.Transform.AFFINE, _random_affine(rng), Image.Resampling.BILINEAR
    )
    ink = np.asarray(changed.reduce(fonts.SUPERSAMPLE), np.float32)
    noisy = ink + NOISE * rng.standard_normal(ink.shape, np.float32)
    return np.rint(np.clip(noisy, 0, 255)).astype(np.uint8)


def _random_affine(rng: np.random.Generator) -> tuple[float, ...]:
    """Draws an affine map about the centre of the large canvas, as Pillow's six numbers."""
    angle, zoom, shear = rng.uniform(-1, 1, 3) * (ROTATION, SCALE, SHEAR)
    cos, sin = math.cos(angle), math.sin(angle)
    linear = np.array([[cos, -sin], [sin, cos]]) @ np.array([[1, shear], [0, 1]]) / (1 + zoom)
    centre = SIZE * fonts.SUPERSAMPLE / 2
    shift = rng.uniform(-SHIFT, SHIFT, 2) * fonts.SUPERSAMPLE
    offset = centre - linear @ (centre + shift)
    return (*linear[0].tolist(), float(offset[0]), *linear[1].tolist(), float(offset[1]))


def encoded(pixels: np.ndarray) -> dict[str, Any]:
    """Returns the parts of an example that follow from its picture."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "png")
    return {"image": file.getvalue(), "height": len(pixels), "width": pixels.shape[1]}


def split_classes(
    classes: Iterable[fonts.GlyphClass],
) -> tuple[list[fonts.GlyphClass], list[fonts.GlyphClass]]:
    """Splits the classes at random, with a fixed seed, into training and test classes.

    Both keep the given order. A class's label is its index in the two lists joined.
    """
    classes = list(classes)
    order = np.random.default_rng(SEED).permutation(len(classes))
    chosen = set(order[: round(TEST_SHARE * len(classes))].tolist())
    train = [c for i, c in enumerate(classes) if i not in chosen]
    test = [c for i, c in enumerate(classes) if i in chosen]
    return train, test


def examples(classes: Iterable[fonts.GlyphClass]) -> Iterator[Example]:
    """Yields the examples of the given classes, ordered by class, then by face."""
    for glyph_class in classes:
        for glyph in glyph_class.glyphs:
            yield {
                **encoded(render(glyph)),
                "name": f"U+{glyph.codepoint:04X}/{glyph.face}",
                "class_name": glyph_class.name,
                "superlabel": glyph_class.script,
            }


class Glyphs(RecordBuilder):
    """Letters in many faces; the classes of the two splits are disjoint."""

    VERSION = tfds.core.Version("1.1.0")
    DESCRIPTION = "Letters rendered from the fonts of matplotlib under small random changes."
    IMAGE_SHAPE = (SIZE, SIZE, 1)

    def _examples_by_split(self) -> dict[str, Iterator[Example]]:
        # Finding the classes compares all drawings: too slow for opening a prepared dataset.
        train, test = split_classes(fonts.glyph_classes())
        self.info.features["label"].names = [c.name for c in train + test]
        self._total = sum(len(c.glyphs) for c in train + test)
        return {"train": examples(train), "test": examples(test)}
