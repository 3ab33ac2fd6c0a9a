"""Named tuples that packages exchange, and how tables' cells become names of classes and splits."""

import collections
import contextlib
import decimal
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Array, Bool, Float, Int, PyTree, Shaped

from hypjax.errors import UserError

Recalls = Mapping[str, Mapping[str, float]]  # {"head": {"recall@1": 0.7, ...}, "encoder": ...}
# Names of splits, each with its synonyms, which the library `datasets` and others use.
SPLITS = {
    "train": ("training",),
    "validation": ("valid", "val", "dev"),
    "test": ("testing", "eval", "evaluation"),
    "query": ("queries",),
    "gallery": (),
}
_SPLIT_OF = {name: split for split, synonyms in SPLITS.items() for name in (split, *synonyms)}
_SUFFIX = re.compile(r"[-_ ]?(set|data|images)$")  # The end of names such as training_set.
IMAGES = "images"  # Name of the tower that embeds images, which every model has.
TEXTS = "texts"  # Name of the tower that embeds texts.
POSITIVES = "positives"  # Input of a batch with captions: whether text j describes image i.
_WHOLE_NUMBER = re.compile(r"([+-]?\d+)\.0*")
MISSING = {"none", "nan", "nat", "<na>"}  # Printed forms of None, NaN, NaT and pandas' NA.

CAPTIONS = "captions"  # A run's hash of which image has which captions.
TEXT_ENCODER = "text_encoder"  # A run's hash of its encoder of texts.


def class_name(label: object, where: str = "labels") -> str:
    """Returns the class name of a label, '' if it is missing; 3, 3.0 and '3.0' all become '3'.

    Raises a UserError that begins with `where` if the label is no name and no whole number.
    """
    value: Any = label
    if getattr(label, "ndim", None) == 0:
        value = value.item()
    if isinstance(value, bytes):
        with contextlib.suppress(UnicodeDecodeError):
            value = value.decode()
    if is_real := isinstance(value, float | decimal.Decimal):
        value = int(value) if value % 1 == 0 else value
    text = str(value).strip()
    if label is np.ma.masked or (not isinstance(value, str) and text.lower() in MISSING):
        return ""
    if not isinstance(value, str | int) and (is_real or hasattr(value, "__len__")):
        raise UserError(f"{where}: {label!r:.80} is neither a name nor a whole number")
    whole = _WHOLE_NUMBER.fullmatch(text)
    return whole[1] if whole else text


def composed(name: str) -> str:
    """Returns the form in which names are compared (NFC): macOS may write é as e and an accent."""
    return unicodedata.normalize("NFC", name)


def one_spelling(names: Iterable[str]) -> list[str]:
    """Gives names that differ only in their Unicode form the spelling that occurs first."""
    first: dict[str, str] = {}
    return [first.setdefault(composed(name), name) for name in names]


def cased_alike(names: Iterable[str]) -> str:
    """Says which classes differ only in upper and lower case; '' if none do."""
    groups = collections.defaultdict(list)
    for name in sorted({*one_spelling(names)}):
        groups[composed(name).casefold()].append(name)
    alike = [" and ".join(group) for group in groups.values() if len(group) > 1]
    return f"classes that differ only in case: {len(alike)}, such as {alike[0]}" if alike else ""


def class_names(numbers: Sequence[int | None], names: Sequence[str]) -> list[str]:
    """Looks up names of numbered classes; '' for None and −1, which mark missing labels."""
    return ["" if number is None or number < 0 else names[number] for number in numbers]


def coarse_levels(coarse_labels: Iterable[str]) -> list[Shaped[np.ndarray, " images"]]:
    """Coarse classes of images at each level, finest first: Food/Fruit is below Food."""
    paths = [str(label).split("/") for label in coarse_labels]
    depths = range(max(map(len, paths), default=0), 0, -1)
    levels = (["/".join(path[:depth]) for path in paths] for depth in depths)
    return [np.array(one_spelling(level), object) for level in levels]


def split_name(name: object) -> str:
    """Translates a usual name of a split, such as Val to 'validation'; keeps other names."""
    text = class_name(name, "splits")
    return _SPLIT_OF.get(_SUFFIX.sub("", text.lower()), text)


def split_names(names: Iterable[object]) -> list[str]:
    """Translates a column of split names; rejects mixed synonyms, such as both test and eval."""
    texts = [class_name(name, "splits") for name in names]
    split_of = {text: split_name(text) for text in dict.fromkeys(texts)}
    spellings: dict[str, str] = {}
    for text, split in split_of.items():
        first = spellings.setdefault(split, text)
        if first.lower() != text.lower():
            raise UserError(f"{first} and {text} are both names of the split {split}; rename one")
    return [split_of[text] for text in texts]


class GroundTruth(NamedTuple):
    """Gallery items that show the same object as each query (Radenović et al., CVPR 2018).

    For each query, indices of the items that show its object clearly (easy), under difficult
    conditions (hard), or so little that scores ignore them (junk).
    """

    easy: Sequence[Int[np.ndarray, " items"]]
    hard: Sequence[Int[np.ndarray, " items"]]
    junk: Sequence[Int[np.ndarray, " items"]]


class View(NamedTuple):
    """Size and channels of the images that the model receives, and how test images are cropped."""

    side: int  # Side of the square images, in pixels.
    resize: int  # Length of the shorter side before the test view 'centre_crop' crops the square.
    channels: int  # 1 for greyscale, 3 for RGB.
    test: str = "centre_crop"  # A key of `hypjax.data.views.TEST_VIEWS`.


class Frame(NamedTuple):
    """The box of an image that a view crops after resizing."""

    size: tuple[int, int]  # Height and width to resize to first.
    box: tuple[int, int, int, int]  # Top, left, height and width, in pixels of the resized image.

    @property
    def is_padded(self) -> bool:
        """Whether the box extends beyond the image, where it is black."""
        top, left, height, width = self.box
        return min(top, left, self.size[0] - top - height, self.size[1] - left - width) < 0

    def box_within(self, size: tuple[int, int]) -> tuple[float, float, float, float]:
        """Scales the box to an image of another (height, width), such as the original image."""
        top, left, height, width = self.box
        scale_y, scale_x = size[0] / self.size[0], size[1] / self.size[1]
        return top * scale_y, left * scale_x, height * scale_y, width * scale_x


class Crops(NamedTuple):
    """Crop boxes of images in the device cache, which the device crops itself."""

    row: Int[Any, " rows"]  # First row of each image in the device cache.
    transposed: Bool[Any, " rows"]  # Whether the cache holds the image transposed.
    boxes: Int[Any, "rows 4"]  # Top, left, height and width, in the untransposed image.


class CachedFeatures(NamedTuple):
    """What frozen layers computed for images before training, in place of the pixels."""

    values: Float[Any, "rows ..."]  # The encoder's embeddings, or the output of a block.


class Batch(NamedTuple):
    """A batch as the train step takes it: arrays of the host, then of the devices.

    Where batches are drawn by class, images of one class are adjacent. With several devices,
    `inputs` and `flips` may end in padding; `labels` and `ids` do not.
    """

    # What each tower embeds, by the tower's name, with a row for each image. The tower of images
    # takes pixels (uint8, [rows, height, width, channels]), `Crops` or `CachedFeatures`.
    inputs: Mapping[str, PyTree]
    labels: Int[Any, " batch"]  # Training classes.
    ids: Int[Any, " batch"]  # Indices in the training set.
    flips: Bool[Any, " rows"]  # Whether the tower of images mirrors each image left to right.


class Outputs(NamedTuple):
    """Outputs of a tower for a batch, before a space embeds them; float32."""

    pooled: Float[Array, "*batch encoder_dim"]  # The encoder's embedding.
    projected: Float[Array, "*batch head_dim"]  # The head's output.
