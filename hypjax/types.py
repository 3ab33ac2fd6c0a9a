"""Tuples of arrays that the packages exchange, and names of classes and splits in all tables."""

import contextlib
import decimal
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
from jaxtyping import Array, Bool, Float, Int, Shaped, UInt8

from hypjax.errors import UserError

Recalls = Mapping[str, Mapping[str, float]]  # {"head": {"recall@1": 0.7, ...}, "encoder": ...}
# Splits, and their other usual names, such as in the library `datasets`.
SPLITS = {
    "train": ("training",),
    "validation": ("valid", "val", "dev"),
    "test": ("testing", "eval", "evaluation"),
    "query": ("queries",),
    "gallery": (),
}
_SPLIT_OF = {name: split for split, others in SPLITS.items() for name in (split, *others)}
_SUFFIX = re.compile(r"[-_ ]?(set|data|images)$")  # Of names such as training_set.
_WHOLE_NUMBER = re.compile(r"([+-]?\d+)\.0*")
MISSING = {"none", "nan", "nat", "<na>"}  # How missing values that are no strings print.


def class_name(label: object, where: str = "labels") -> str:
    """Name of a label's class, '' if it is missing; 3, 3.0 and '3.0' are one class, '3'.

    Raises a UserError that names the place if the label is neither a name nor a whole number.
    """
    value = label.item() if getattr(label, "ndim", None) == 0 else label
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
    return whole[1] if (whole := _WHOLE_NUMBER.fullmatch(text)) else text


def class_names(numbers: Sequence[int | None], names: Sequence[str]) -> list[str]:
    """Names of numbered classes; '' where the number is None, or −1, which marks missing labels."""
    return ["" if number is None or number < 0 else names[number] for number in numbers]


def coarse_levels(names: Iterable[str]) -> list[Shaped[np.ndarray, " images"]]:
    """Coarse classes of images at each level, finest first; Food/Fruit is a part of Food."""
    paths = [str(name).split("/") for name in names]
    depths = range(max(map(len, paths), default=0), 0, -1)
    return [np.array(["/".join(path[:depth]) for path in paths], object) for depth in depths]


def split_name(name: object) -> str:
    """The split that a name stands for, such as 'validation' for Val, or else the name."""
    text = class_name(name, "splits")
    return _SPLIT_OF.get(_SUFFIX.sub("", text.lower()), text)


def split_names(names: Iterable[object]) -> list[str]:
    """The splits of a dataset; raises a UserError if two names, as test and eval, stand for one."""
    texts = [class_name(name, "splits") for name in names]
    split_of = {text: split_name(text) for text in dict.fromkeys(texts)}
    spellings: dict[str, str] = {}
    for text, split in split_of.items():
        first = spellings.setdefault(split, text)
        if first.lower() != text.lower():
            raise UserError(f"{first} and {text} are both names of the split {split}; rename one")
    return [split_of[text] for text in texts]


class GroundTruth(NamedTuple):
    """Gallery items that show what each query shows (Radenović et al., CVPR 2018).

    For each query, indices of the items that show it clearly (easy), under difficult conditions
    (hard), and hardly at all (junk, which never count).
    """

    easy: Sequence[Int[np.ndarray, " items"]]
    hard: Sequence[Int[np.ndarray, " items"]]
    junk: Sequence[Int[np.ndarray, " items"]]


class View(NamedTuple):
    """The images that the model receives, and how the test view makes them."""

    side: int  # Of the square images, in pixels.
    resize: int  # Length of the shorter side before the test view 'centre_crop' crops the square.
    channels: int  # 1 for greyscale, 3 for RGB.
    test: str = "centre_crop"  # See `hypjax.data.views`.

    @classmethod
    def of(cls, data: Any) -> Self:
        """The view that the fields of `config.data` describe."""
        return cls(data.image_size, data.resize, data.channels, data.test_view)


class Frame(NamedTuple):
    """The part of an image, or of each image of a batch, that a view shows."""

    size: tuple[int, int] | Int[np.ndarray, "batch 2"]  # Height and width to resize to first.
    # Top, left, height and width, in pixels of that size.
    box: tuple[int, int, int, int] | Int[np.ndarray, "batch 4"]

    def box_within(self, size: tuple[int, int]) -> tuple[float, float, float, float]:
        """Returns the box in pixels of the original image, of this height and width."""
        top, left, height, width = self.box
        down, across = size[0] / self.size[0], size[1] / self.size[1]
        return top * down, left * across, height * down, width * across


class Crops(NamedTuple):
    """Crop boxes for images in device memory, which the devices crop themselves."""

    row: Int[Array, " rows"]  # First row of each image in the device cache.
    transposed: Bool[Array, " rows"]  # Whether the cache holds the image transposed.
    boxes: Int[Array, "rows 4"]  # Top, left, height and width, in the untransposed image.


class Batch(NamedTuple):
    """Training images: as a plan chooses them, then as the input pipeline delivers them.

    Where batches are drawn by class, images of one class are adjacent. With several devices,
    `images` and `flips` may end in padding; `labels` and `ids` do not.
    """

    # In a plan, frames to crop; then cropped pixels, crops for the device, or the encoder's cached
    # embeddings. The device normalises and flips pixels.
    images: (
        Frame
        | UInt8[Array, "rows height width channels"]
        | Crops
        | Float[Array, "rows encoder_dim"]
    )
    labels: Int[Array, " batch"]  # Training classes.
    ids: Int[Array, " batch"]  # Indices in the training set.
    flips: Bool[Array, " rows"]  # Whether to mirror each image left to right.


class Outputs(NamedTuple):
    """Embeddings of a batch before they are mapped to a space; float32."""

    pooled: Float[Array, "batch encoder_dim"]  # The encoder's embedding.
    projected: Float[Array, "batch head_dim"]  # The head's output, to be embedded in a space.
