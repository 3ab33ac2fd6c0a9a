"""The tuples of arrays that rooms hand to each other, so that none needs to know another."""

import os
from typing import NamedTuple

from jaxtyping import Array, Bool, Float, Int, UInt8


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


class Hits(NamedTuple):
    """What was found for a query.

    Attributes:
        query: Path of the image.
        label: Its class; '' where it is not known.
        paths: Of the images found, the nearest first.
        labels: Their classes; '' where they are not known.
        distances: From the query.
    """

    query: str
    label: str
    paths: list[str]
    labels: list[str]
    distances: list[float]

    def mark(self, i: int) -> str:
        """Whether a hit is 'right' or 'wrong'; '' where that is not known."""
        if not (self.label and self.labels[i]):
            return ""
        return "right" if self.label == self.labels[i] else "wrong"

    def table(self) -> str:
        """Rank, distance, whether it is right, and path, a line a hit."""
        known = f" ({self.label})" if self.label else ""
        lines = [
            f"{_shown(self.query)}{known}",
            "rank   distance  " + ("       " if known else "") + "path",
        ]
        for i, (path, distance) in enumerate(zip(self.paths, self.distances, strict=True)):
            mark = f"{self.mark(i):<7}" if known else ""
            lines.append(f"{i + 1:>4} {distance:>10.4f}  {mark}{_shown(path)}")
        return "\n".join(lines)


def _shown(path: str) -> str:
    """A path as one would type it here."""
    shorter = os.path.relpath(path)
    return path if shorter.startswith(os.pardir) else shorter
