"""The tuples of arrays that rooms hand to each other, so that none needs to know another."""

from collections.abc import Mapping
from typing import Any, NamedTuple, Self

from jaxtyping import Array, Bool, Float, Int, UInt8

Recalls = Mapping[str, Mapping[str, float]]  # {"head": {"recall@1": 0.7, ...}, "encoder": ...}


class View(NamedTuple):
    """How large images are when they reach the model.

    Attributes:
        side: Of the square images, in pixels.
        shorter_side: Length to which the test view resizes the shorter side of an image before it
            cuts the square from the centre. Training crops do not use it.
        channels: 1 for greyscale, 3 for RGB.
    """

    side: int
    shorter_side: int
    channels: int

    @classmethod
    def of(cls, data: Any) -> Self:
        """The view that the fields of `config.data` describe."""
        return cls(data.image_size, data.resize, data.channels)


class Workers(NamedTuple):
    """What decodes images.

    Attributes:
        count: Worker processes; 0 uses threads of this process.
        timeout: Most seconds to wait for a piece of a batch.
    """

    count: int = 0
    timeout: float = 600.0


class Crops(NamedTuple):
    """Boxes of images that lie on the devices, which are to cut them out themselves.

    Attributes:
        row: First row of each image in the store.
        turned: Whether it is stored with rows for columns.
        boxes: What to cut from it, as it was before: top, left, height, width.
    """

    row: Int[Array, " rows"]
    turned: Bool[Array, " rows"]
    boxes: Int[Array, "rows 4"]


class Batch(NamedTuple):
    """Images to train on, as the input delivers them.

    Images of one class are neighbours: image i is sample i mod d of class i // d of the batch.
    Where several devices share the images, others after the last fill their shares up.

    Attributes:
        images: Cropped and resized pixels; normalisation and flips are left to the device. Or what
            the device is to crop.
        labels: Training class of each image, without those that fill up.
        ids: Position of each image in the training set, likewise.
        flips: Whether the image is to be mirrored left to right.
    """

    images: UInt8[Array, "rows height width channels"] | Crops
    labels: Int[Array, " batch"]
    ids: Int[Array, " batch"]
    flips: Bool[Array, " rows"]


class Outputs(NamedTuple):
    """A model's answer to images, before any space; float32.

    Attributes:
        pooled: The encoder's embedding.
        projected: The head's map of it, which an objective and its scorer embed in their space.
    """

    pooled: Float[Array, "batch encoder_dim"]
    projected: Float[Array, "batch head_dim"]
