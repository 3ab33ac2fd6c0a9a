"""Glyphs: an embedded retrieval data set of letters, built from the fonts of matplotlib.

A class is a letter, its images are the faces that contain it, and no class of the test split
occurs in training. Nothing is downloaded, and every preparation gives the same records in the
same order (though not the same file bytes: protobuf orders the fields of a record at will):

    builder = Glyphs(data_dir=...)
    builder.download_and_prepare()
    source = builder.as_data_source("train", decoders={"image": tfds.decode.SkipDecoding()})
"""

import math
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import tensorflow_datasets as tfds
from PIL import Image

from hypjax.data import fonts

_DESCRIPTION = """Letters rendered from the fonts of matplotlib under small random changes.

A class is a letter, its images are the faces that contain it; the classes of the splits are
disjoint."""

SIZE = fonts.SIZE
SEED = 20240229
TEST_SHARE = 0.25  # Of the classes.

# Largest random changes, drawn uniformly on both sides of none.
ROTATION = math.radians(5)
SCALE = 0.08
SHEAR = 0.05
SHIFT = 2.0  # Pixels, in each direction.
NOISE = 8.0  # Standard deviation, on the scale of 0 to 255.


def render(glyph: fonts.Glyph) -> np.ndarray:
    """Renders a glyph under the random changes that belong to it.

    The changes depend on the character and the name of the face only, not on any order.

    Args:
      glyph: what to render.

    Returns:
      (SIZE, SIZE) uint8, light ink on a dark ground.
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
    """Draws a map about the centre of the large canvas, in the six numbers Pillow takes."""
    angle, zoom, shear = rng.uniform(-1, 1, 3) * (ROTATION, SCALE, SHEAR)
    cos, sin = math.cos(angle), math.sin(angle)
    linear = np.array([[cos, -sin], [sin, cos]]) @ np.array([[1, shear], [0, 1]]) / (1 + zoom)
    centre = SIZE * fonts.SUPERSAMPLE / 2
    shift = rng.uniform(-SHIFT, SHIFT, 2) * fonts.SUPERSAMPLE
    offset = centre - linear @ (centre + shift)
    return (*linear[0].tolist(), float(offset[0]), *linear[1].tolist(), float(offset[1]))


def split_classes(
    classes: Iterable[fonts.GlyphClass],
) -> tuple[list[fonts.GlyphClass], list[fonts.GlyphClass]]:
    """Parts the classes into training and test at random, the same way each time.

    Args:
      classes: all classes.

    Returns:
      Training and test classes, each in the order given. A class's label is its place in the
      one list followed by the other.
    """
    classes = list(classes)
    order = np.random.default_rng(SEED).permutation(len(classes))
    chosen = set(order[: round(TEST_SHARE * len(classes))].tolist())
    train = [c for i, c in enumerate(classes) if i not in chosen]
    test = [c for i, c in enumerate(classes) if i in chosen]
    return train, test


def examples(classes: Iterable[fonts.GlyphClass]) -> Iterator[dict[str, Any]]:
    """Yields the records of some classes, class by class and then by face."""
    for glyph_class in classes:
        for glyph in glyph_class.glyphs:
            yield {
                # Without TensorFlow, TFDS encodes images of Pillow but not arrays.
                "image": Image.fromarray(render(glyph)),
                "height": SIZE,
                "width": SIZE,
                "label": glyph_class.name,
                "name": f"U+{glyph.codepoint:04X}/{glyph.face}",
                "class_name": glyph_class.name,
                "script": glyph_class.script,
                "base": glyph_class.base,
                "face": glyph.face,
            }


class Glyphs(tfds.core.GeneratorBasedBuilder):
    """Letters in many faces; the classes of the two splits are disjoint."""

    VERSION = tfds.core.Version("1.0.0")
    RELEASE_NOTES = {"1.0.0": "First version."}
    # Nothing is downloaded. Left to itself, TFDS 4.9 looks for a list of checksums, and for that
    # imports importlib_resources, which it does not declare for this Python.
    url_infos = None

    def __init__(self, *, file_format: str = "array_record", **kwargs: Any):
        """Opens the data set, prepared or not.

        Args:
          file_format: how records are stored; the default gives random access.
          **kwargs: of the TFDS builder, `data_dir` above all.
        """
        super().__init__(file_format=file_format, **kwargs)

    def _info(self) -> tfds.core.DatasetInfo:
        features = tfds.features.FeaturesDict(
            {
                "image": tfds.features.Image(shape=(SIZE, SIZE, 1), encoding_format="png"),
                "height": np.int32,
                "width": np.int32,
                # Names follow in _split_generators, or from the prepared files: to find them
                # means comparing all drawings, which opening a prepared data set must not cost.
                "label": tfds.features.ClassLabel(),
                "name": tfds.features.Text(doc="Code point and face, unique."),
                "class_name": tfds.features.Text(doc="The letter and its Unicode name."),
                "script": tfds.features.Text(),
                "base": tfds.features.Text(doc="The letter without its accents."),
                "face": tfds.features.Text(doc="Name of the font file."),
            }
        )
        return self.dataset_info_from_configs(
            description=_DESCRIPTION,
            features=features,
            supervised_keys=("image", "label"),
            disable_shuffling=True,
        )

    def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> dict[str, Any]:
        del dl_manager
        train, test = split_classes(fonts.glyph_classes())
        self.info.features["label"].names = [c.name for c in train + test]
        return {"train": self._generate_examples(train), "test": self._generate_examples(test)}

    def _generate_examples(self, classes: list[fonts.GlyphClass]) -> Iterator[tuple[int, Any]]:
        yield from enumerate(examples(classes))
