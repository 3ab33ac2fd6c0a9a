"""Images that a caller gives from Python, as paths or in memory."""

import os
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from hypjax.data.photos.finding import find_photos
from hypjax.data.photos.photo import Photo
from hypjax.errors import UserError

_CHANNELS = ((), (1,), (3,), (4,))  # Shapes of the axes after height and width.
Given = str | os.PathLike[str] | Image.Image | UInt8[np.ndarray, "height width *channels"]


def given_photos(images: Given | Sequence[Given]) -> list[Photo]:
    """Finds the images that a caller gives; those in memory are named 'image 0', 'image 1', ...

    Args:
        images: One of, or a sequence of: a path, for which see `find_photos`; an image of Pillow's;
            pixels, uint8 of [height, width] or [height, width, channels] with 1, 3 or 4 channels.
            An array of four axes holds several images.

    Raises:
        UserError: There are no images, or something is none.
    """
    if isinstance(images, str | os.PathLike | Image.Image):
        images = [images]
    elif getattr(images, "ndim", 4) < 4:
        images = [images]
    try:
        found = [photo for i, image in enumerate(images) for photo in _photos(image, i)]
    except TypeError as error:
        raise _refusal(images) from error
    if not found:
        raise UserError("there are no images; give paths, images of Pillow's, or arrays of pixels")
    return found


def _photos(given: Any, number: int) -> list[Photo]:
    if isinstance(given, str | os.PathLike):
        return find_photos(os.fspath(given))
    name = pathlib.Path(f"image {number}")
    if isinstance(given, Image.Image):
        return [Photo(name, "", image=given)]
    if not hasattr(given, "__array__"):
        raise _refusal(given)
    values = np.asarray(given)
    if values.dtype != np.uint8 or values.ndim < 2 or values.shape[2:] not in _CHANNELS:
        raise UserError(
            f"an array of {values.dtype} with shape {list(values.shape)} is no image; pixels are "
            "uint8, [height, width] or [height, width, channels] with 1, 3 or 4 channels"
        )
    pixels = values[..., 0] if values.shape[2:] == (1,) else values
    return [Photo(name, "", image=Image.fromarray(pixels))]


def _refusal(given: Any) -> UserError:
    return UserError(
        f"{type(given).__name__} is no image; give a path, an image of Pillow's, or an array"
    )
