"""Pixels on the host: one decoder, and the two views of an image."""

import io

import numpy as np
from jaxtyping import UInt8
from PIL import Image, ImageOps, UnidentifiedImageError

# Colour mode by number of channels.
_MODES = {1: "L", 3: "RGB"}


def decode(encoded: bytes, channels: int) -> Image.Image:
    """Decodes an image file to greyscale (1 channel) or RGB (3); EXIF orientation is ignored."""
    image = Image.open(io.BytesIO(encoded))
    return image.convert(_MODES[channels])


def decode_photo(encoded: bytes, channels: int) -> Image.Image:
    """Decodes a user's own picture as a viewer shows it, to greyscale (1 channel) or RGB (3).

    Turned upright as EXIF says, transparency on white, 16 bits scaled to 8, the first of several
    frames.

    Raises:
        ValueError: Its pixels have 32 bits, which no common scale gives a meaning.
        OSError: It cannot be decoded.
    """
    image = ImageOps.exif_transpose(Image.open(io.BytesIO(encoded)))
    if image.mode.startswith("I;16"):
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise ValueError("it has 32 bits a pixel; save it with 8 or 16")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert(_MODES[channels])


def reason(error: Exception) -> str:
    """Why an image could not be read, in a few words."""
    if isinstance(error, UnidentifiedImageError):
        return "not an image"
    text = getattr(error, "strerror", None) or next(iter(str(error).splitlines()), "")
    return text or type(error).__name__


def crop_and_resize(
    image: Image.Image, box: np.ndarray, side: int
) -> UInt8[np.ndarray, "side side channels"]:
    """Cuts out a box (top, left, height, width) and resizes it to a square.

    Pillow's bicubic filter with antialiasing, applied to the crop alone.
    """
    top, left, height, width = (int(n) for n in box)
    cropped = image.crop((left, top, left + width, top + height))
    return _array(cropped.resize((side, side), Image.Resampling.BICUBIC))


def central_view(
    image: Image.Image, shorter_side: int, side: int
) -> UInt8[np.ndarray, "side side channels"]:
    """The test view: the shorter side resized, bicubic, then a square cut from the centre.

    Sizes round as torchvision's Resize and CenterCrop do.
    """
    shorter = min(image.size)
    size = tuple(shorter_side * length // shorter for length in image.size)
    resized = image.resize(size, Image.Resampling.BICUBIC)
    left = round((resized.width - side) / 2)
    top = round((resized.height - side) / 2)
    return _array(resized.crop((left, top, left + side, top + side)))


def _array(image: Image.Image) -> UInt8[np.ndarray, "height width channels"]:
    array = np.asarray(image)
    return array if array.ndim == 3 else array[..., None]
