"""Views: how images are resized and cropped for the model, in training and in evaluation.

A view resizes an image, and crops a box, which is resized to the model's square. `TRAIN_VIEWS` and
`TEST_VIEWS` hold the values of `data.train_view` and `data.test_view`.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int

from hypjax.types import Frame, View

_CROP_ATTEMPTS = 10
Sizes = Int[np.ndarray, "n 2"]  # Heights and widths, in pixels.
Boxes = Int[np.ndarray, "n 4"]  # Top, left, height and width, in pixels.


@runtime_checkable
class TrainView(Protocol):
    """A random view for training."""

    @property
    def flip(self) -> float:
        """Probability of mirroring."""

    def sizes(self, originals: Sizes) -> Sizes:
        """Returns the sizes to which images are resized before they are cropped."""

    def boxes(self, rng: np.random.Generator, sizes: Sizes) -> Boxes:
        """Draws a box for each resized image."""


@dataclasses.dataclass(frozen=True)
class RandomCrop:
    """A random box of the image, as in torchvision's RandomResizedCrop."""

    area: tuple[float, float]  # Smallest and largest fraction of the image's area.
    ratio: tuple[float, float]  # Smallest and largest width / height; log-uniform.
    flip: float  # Probability of mirroring.
    stored_side: int | None = None  # First, shorter sides are scaled down to at most this length.

    def sizes(self, originals: Sizes) -> Sizes:
        """Returns the original sizes, scaled down to `stored_side` if it is set."""
        if self.stored_side is None:
            return originals
        shorter = originals.min(axis=1, keepdims=True)
        scaled = np.rint(originals * (self.stored_side / shorter)).astype(originals.dtype)
        return np.where(shorter > self.stored_side, scaled, originals)

    def boxes(self, rng: np.random.Generator, sizes: Sizes) -> Boxes:
        """Draws ten boxes per image and takes the first that fits, or else the largest, centred."""
        shape = (len(sizes), _CROP_ATTEMPTS)
        area = sizes.prod(axis=1, keepdims=True) * rng.uniform(*self.area, shape)
        low, high = np.log(self.ratio)
        ratio = np.exp(rng.uniform(low, high, shape))
        drawn = np.rint(np.sqrt(np.stack([area / ratio, area * ratio], axis=2))).astype(np.int64)
        fits = ((0 < drawn) & (drawn <= sizes[:, None])).all(axis=2)
        first_fitting = drawn[np.arange(len(sizes)), np.argmax(fits, axis=1)]
        min_ratio, max_ratio = self.ratio
        height, width = sizes.T
        max_height = np.where(width / height < min_ratio, np.rint(width / min_ratio), height)
        max_width = np.where(width / height > max_ratio, np.rint(height * max_ratio), width)
        largest = np.maximum(np.stack([max_height, max_width], axis=1), 1).astype(np.int64)
        any_fits = fits.any(axis=1)[:, None]
        extent = np.where(any_fits, first_fitting, largest)
        margin = sizes - extent
        corner = np.where(any_fits, rng.integers(0, margin, endpoint=True), margin // 2)
        return np.concatenate([corner, extent], axis=1).astype(np.int32)


@dataclasses.dataclass(frozen=True)
class ResizeCrop:
    """A random square box of the image, which is first squashed to a larger square (IRT)."""

    resize: int  # Side of the square to which the image is resized.
    side: int  # Side of the box, at most `resize`.
    flip: float  # Probability of mirroring.

    def sizes(self, originals: Sizes) -> Sizes:
        """Returns `resize` as height and width of every image."""
        return np.full_like(originals, self.resize)

    def boxes(self, rng: np.random.Generator, sizes: Sizes) -> Boxes:
        """Draws the position of each box uniformly."""
        corner = rng.integers(0, sizes - self.side, endpoint=True)
        return np.concatenate([corner, np.full_like(corner, self.side)], axis=1).astype(np.int32)


def centre_crop(height: int, width: int, view: View) -> Frame:
    """Resizes the shorter side to `view.resize`, and crops the centre square, like torchvision."""
    shorter = min(height, width)
    size = view.resize * height // shorter, view.resize * width // shorter
    top, left = (round((length - view.side) / 2) for length in size)
    return Frame(size, (top, left, view.side, view.side))


def letterbox(height: int, width: int, view: View) -> Frame:
    """Resizes the longer side to the square's, and pads the shorter with black, centred.

    As Pillow's `ImageOps.pad`, but no side rounds to 0. A box outside the image is black there.
    """
    longer = max(height, width)
    height, width = (max(1, round(length / longer * view.side)) for length in (height, width))
    top, left = (-round((view.side - length) / 2) for length in (height, width))
    return Frame((height, width), (top, left, view.side, view.side))


# Functions that build a training view from the fields of `config.data`.
TRAIN_VIEWS: dict[str, Callable[[Mapping[str, Any]], TrainView]] = {
    "area_crop": lambda data: RandomCrop(
        data["crop_area"], data["crop_ratio"], data["flip"], data["stored_side"]
    ),
    "resize_crop": lambda data: ResizeCrop(data["resize"], data["image_size"], data["flip"]),
}
# Functions that compute a test view's frame from an image's height and width.
TEST_VIEWS: dict[str, Callable[[int, int, View], Frame]] = {
    "centre_crop": centre_crop,
    "letterbox": letterbox,
    # The whole image, resized to the square whatever its shape (IRT's particular objects).
    "squash": lambda _, __, view: Frame((view.side, view.side), (0, 0, view.side, view.side)),
}
