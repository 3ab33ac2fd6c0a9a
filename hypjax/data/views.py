"""Views: what the model sees of an image, in training and in evaluation.

A view resizes an image, and cuts out a box, which is resized to the model's square. Registries at
the end hold the views that `data.train_view` and `data.test_view` name.
"""

import dataclasses
from collections.abc import Callable
from typing import Protocol

import numpy as np
from jaxtyping import Int
from ml_collections import ConfigDict

from hypjax.types import Frame, View

_CROP_ATTEMPTS = 10
Sizes = Int[np.ndarray, "n 2"]  # Heights and widths, in pixels.
Boxes = Int[np.ndarray, "n 4"]  # Top, left, height and width, in pixels.


class TrainView(Protocol):
    """A random view for training."""

    flip: float  # Probability of mirroring.

    def sizes(self, originals: Sizes) -> Sizes:
        """Returns the sizes to which images are resized, and stored, before they are cropped."""

    def boxes(self, rng: np.random.Generator, sizes: Sizes) -> Boxes:
        """Draws a box (top, left, height, width) for each image of these heights and widths."""


@dataclasses.dataclass(frozen=True)
class RandomCrop:
    """A random box of the image, as in torchvision's RandomResizedCrop."""

    area: tuple[float, float]  # Smallest and largest fraction of the image's area.
    ratio: tuple[float, float]  # Smallest and largest width / height; log-uniform.
    flip: float  # Probability of mirroring.
    stored_side: int | None = None  # Images whose shorter side is longer are scaled down first.

    def sizes(self, originals: Sizes) -> Sizes:
        """Returns the original sizes, or those that the device cache stores."""
        if self.stored_side is None:
            return originals
        shorter = originals.min(axis=1, keepdims=True)
        scaled = np.rint(originals * (self.stored_side / shorter)).astype(originals.dtype)
        return np.where(shorter > self.stored_side, scaled, originals)

    def boxes(self, rng: np.random.Generator, sizes: Sizes) -> Boxes:
        """Draws the first boxes that fit, or else the largest in the centre."""
        shape = (len(sizes), _CROP_ATTEMPTS)
        area = sizes.prod(axis=1, keepdims=True) * rng.uniform(*self.area, shape)
        ratio = np.exp(rng.uniform(*np.log(self.ratio), shape))
        drawn = np.rint(np.sqrt(np.stack([area / ratio, area * ratio], axis=2))).astype(np.int64)
        fits = ((0 < drawn) & (drawn <= sizes[:, None])).all(axis=2)
        first = drawn[np.arange(len(sizes)), np.argmax(fits, axis=1)]
        low, high = self.ratio
        height, width = sizes.T
        h = np.where(width / height < low, np.rint(width / low), height)
        w = np.where(width / height > high, np.rint(height * high), width)
        largest = np.maximum(np.stack([h, w], axis=1), 1).astype(np.int64)
        fitted = fits.any(axis=1)[:, None]
        extent = np.where(fitted, first, largest)
        room = sizes - extent
        corner = np.where(fitted, rng.integers(0, room, endpoint=True), room // 2)
        return np.concatenate([corner, extent], axis=1).astype(np.int32)


@dataclasses.dataclass(frozen=True)
class ResizeCrop:
    """The whole image squashed to a square, and a random window of that (IRT)."""

    resize: int  # Side of the square to which the image is resized.
    side: int  # Of the window; at most `resize`.
    flip: float  # Probability of mirroring.

    def sizes(self, originals: Sizes) -> Sizes:
        """Returns the square's side as the height and width of each image."""
        return np.full_like(originals, self.resize)

    def boxes(self, rng: np.random.Generator, sizes: Sizes) -> Boxes:
        """Draws one window for each square, uniformly among all places."""
        corner = rng.integers(0, sizes - self.side, endpoint=True)
        return np.concatenate([corner, np.full_like(corner, self.side)], axis=1).astype(np.int32)


def centre_crop(height: int, width: int, view: View) -> Frame:
    """Shorter side resized to `view.resize`, then the square in the centre, as by torchvision."""
    shorter = min(height, width)
    size = view.resize * height // shorter, view.resize * width // shorter
    top, left = (round((length - view.side) / 2) for length in size)
    return Frame(size, (top, left, view.side, view.side))


# The view of each name in `hypjax.config.choices`. A training view is built from `config.data`. A
# test view is a function of an image's height and width.
TRAIN_VIEWS: dict[str, Callable[[ConfigDict], TrainView]] = {
    "area_crop": lambda data: RandomCrop(
        data.crop_area, data.crop_ratio, data.flip, data.stored_side
    ),
    "resize_crop": lambda data: ResizeCrop(data.resize, data.image_size, data.flip),
}
TEST_VIEWS: dict[str, Callable[[int, int, View], Frame]] = {
    "centre_crop": centre_crop,
    # The whole image, resized to the square whatever its shape (IRT's particular objects).
    "squash": lambda _, __, view: Frame((view.side, view.side), (0, 0, view.side, view.side)),
}
