"""The tuples of arrays that rooms hand to each other, so that none needs to know another."""

from typing import NamedTuple

from jaxtyping import Array, Bool, Float, Int, UInt8


class Batch(NamedTuple):
    """Images to train on, as the input delivers them.

    Images of one class are neighbours: image i is sample i mod d of class i // d of the batch.

    Attributes:
        images: Cropped and resized pixels; normalisation and flips are left to the device.
        labels: Training class of each image.
        ids: Position of each image in the training set.
        flips: Whether the image is to be mirrored left to right.
    """

    images: UInt8[Array, "batch height width channels"]
    labels: Int[Array, " batch"]
    ids: Int[Array, " batch"]
    flips: Bool[Array, " batch"]


class Outputs(NamedTuple):
    """A model's answer to images, before any space; float32.

    Attributes:
        pooled: The encoder's embedding.
        projected: The head's map of it, which an objective and its scorer embed in their space.
    """

    pooled: Float[Array, "batch encoder_dim"]
    projected: Float[Array, "batch head_dim"]
