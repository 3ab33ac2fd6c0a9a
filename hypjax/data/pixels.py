"""Pixels on the host: the exact and the fast decoder, and resized crops."""

import contextlib
import io
import math
import os
import pathlib
import re
import threading

import numpy as np
import PIL
from jaxtyping import UInt8
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError, features

from hypjax.errors import UserError, installation
from hypjax.types import Frame

with contextlib.suppress(ImportError):  # The extra `heif`.
    import pillow_heif

    pillow_heif.register_heif_opener()

HEIF_INSTALLATION = installation("hypjax[heif]")
# Version of `decode` and of the libraries that determine its pixels; part of cache names.
DECODER = f"1-{PIL.__version__}-{features.version('libjpeg_turbo') or features.version('jpg')}"
# Colour mode by number of channels.
MODES = {1: "L", 3: "RGB"}
_CHANNELS = ((), (1,), (2,), (3,), (4,))  # Possible shapes after height and width.
_JPEG = b"\xff\xd8"  # First bytes of a JPEG file.
_MIN_RATIO = 2  # Smallest ratio of a box that is decoded at a reduced size to the resized square.
# First bytes of files that hold HEIC images.
_HEIF = re.compile(rb".{4}ftyp(he[iv]|mif1|msf1)", re.DOTALL)
LARGEST_FILE = 2**30  # Bytes; larger files are not read into memory.
# Decoding takes up to 10 bytes per pixel, so the threads of a process take turns with large images.
_LARGE_IMAGE = 50_000_000  # Pixels.
_DECODING_LARGE = threading.Lock()


def decode(
    encoded: bytes | Image.Image | np.ndarray,
    channels: int,
    *,
    upright: bool = False,
    least: int | None = None,
) -> Image.Image:
    """Decodes an image file exactly, or converts an image.

    Transparent images are drawn on white, 16 bits are scaled to 8, and only the first frame is
    read.

    Args:
        encoded: The bytes of an image file, a Pillow image, or pixels as in `from_pixels`.
        channels: 1 for greyscale, 3 for RGB.
        upright: Whether to rotate the image as EXIF says, like viewers. Protocols of datasets, and
            therefore published results, ignore EXIF.
        least: Pixels that either side must keep; a JPEG may be decoded at a fraction of its size.

    Raises:
        ValueError: For pixels of 32 bits, which have no common scale. Damaged files raise almost
            any exception.
    """
    if isinstance(encoded, Image.Image):
        with contextlib.suppress(Exception):  # EXIF data may be damaged, as below.
            encoded = ImageOps.exif_transpose(encoded)
        return _pixels(encoded, channels, upright=False)
    if not isinstance(encoded, bytes):
        return _pixels(from_pixels(np.asarray(encoded), "it"), channels, upright)
    try:
        image = Image.open(io.BytesIO(encoded))
    except UnidentifiedImageError as error:
        heic = f"HEIC needs {HEIF_INSTALLATION}"
        raise ValueError(heic if _HEIF.match(encoded) else "not an image") from error
    except Image.DecompressionBombError as error:
        most = f"{2 * Image.MAX_IMAGE_PIXELS:,} pixels"
        raise ValueError(f"more than {most}; scale it down or remove it") from error
    if least is not None:
        image.draft(None, (least, least))
    large = image.width * image.height > _LARGE_IMAGE
    with _DECODING_LARGE if large else contextlib.nullcontext():
        return _pixels(image, channels, upright)


def _pixels(image: Image.Image, channels: int, upright: bool) -> Image.Image:
    """Rotates an image if `upright`, and converts it to the mode of `channels`."""
    if upright:
        image.load()
        # Pillow raises almost anything on damaged EXIF data: before it rotates, when it reads them,
        # or afterwards, when it writes them without the orientation. Both errors are harmless.
        with contextlib.suppress(Exception):
            ImageOps.exif_transpose(image, in_place=True)
    if image.mode.startswith("I;16"):
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise ValueError("it has 32 bits per pixel; save it with 8 or 16")
    if image.mode == "La":  # Pillow converts this mode to LA only.
        image = image.convert("LA")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    if image.mode != MODES[channels]:
        return image.convert(MODES[channels])
    image.load()
    return image


def from_pixels(values: np.ndarray, name: object) -> Image.Image:
    """Converts a user's pixels to a Pillow image; `name` is for the message of a UserError.

    Pixels are uint8, uint16 or bool, [height, width] or [height, width, channels] with 1 to 4
    channels.
    """
    dtype = values.dtype.newbyteorder("=")
    is_valid = dtype in (np.bool_, np.uint8, np.uint16) and values.size
    if not is_valid or values.ndim < 2 or values.shape[2:] not in _CHANNELS:
        needed = "pixels are uint8, uint16 or bool, [height, width] or [height, width, 1 to 4]"
        raise UserError(f"{name} is {values.dtype} of shape {list(values.shape)}; {needed}")
    if dtype == np.bool_:
        values = values * np.uint8(255)
    elif dtype == np.uint16:  # Pillow reads colours of 16 bits, and `_pixels` greys, like this.
        values = (values >> 8).astype(np.uint8)
    return Image.fromarray(values[..., 0] if values.shape[2:] == (1,) else values)


def read_bytes(path: str | pathlib.Path) -> bytes:
    """Reads a file; raises OSError if it cannot be read or is too large."""
    if os.path.getsize(path) > LARGEST_FILE:
        raise OSError(f"larger than {LARGEST_FILE} bytes")
    return pathlib.Path(path).read_bytes()


def read_image(path: str, channels: int, least: int | None = None) -> Image.Image:
    """Decodes an image file upright, see `decode`."""
    return decode(read_bytes(path), channels, upright=True, least=least)


def scaled(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    """Resizes an image to (height, width), unless it already has that size."""
    height, width = size
    if image.size == (width, height):
        return image
    return image.resize((width, height), Image.Resampling.BICUBIC)


def resize(image: Image.Image, side: int) -> UInt8[np.ndarray, "side side channels"]:
    """Resizes an image to a square with Pillow's bicubic filter and antialiasing."""
    return array(image.resize((side, side), Image.Resampling.BICUBIC))


def show(image: Image.Image, frame: Frame, side: int) -> UInt8[np.ndarray, "side side channels"]:
    """Resizes an image to the frame's size, crops the frame's box, and resizes it to a square."""
    top, left, height, width = frame.box
    region = scaled(image, frame.size).crop((left, top, left + width, top + height))
    return resize(region, side)


def show_fast(
    encoded: bytes, channels: int, box: tuple[float, float, float, float], side: int, upright: bool
) -> UInt8[np.ndarray, "side side channels"] | None:
    """Decodes a box (top, left, height, width) of a JPEG no larger than needed, and resizes it.

    JPEG's cosine transform decodes cheaply at a half, a quarter or an eighth of the size; the box
    stays at least twice as large as the square. Pixels differ from exact ones by a few levels, so
    that the decoder is part of a run's identity (`data.decoder`). Returns None for files that only
    the exact decoder reads.
    """
    if not isinstance(encoded, bytes) or not encoded.startswith(_JPEG):
        return None
    top, left, height, width = box
    bottom, right = top + height, left + width
    try:
        image = Image.open(io.BytesIO(encoded))
        if upright and image.getexif().get(ExifTags.Base.Orientation, 1) != 1:
            return None
        if image.mode not in MODES.values() or bottom > image.height or right > image.width:
            return None
        halvings = math.floor(math.log2(min(height, width) / (_MIN_RATIO * side)))
        factor = 2 ** min(3, max(0, halvings))
        image.draft(MODES[channels], (image.width // factor, image.height // factor))
        image = image if image.mode == MODES[channels] else image.convert(MODES[channels])
        image.load()
    except Exception:  # Decoders raise almost anything on damaged files.
        return None
    # Reduced pixels are `factor` pixels wide, even if the last ones extend beyond the image.
    top, left, bottom, right = (edge / factor for edge in (top, left, bottom, right))
    y, x = math.floor(top), math.floor(left)
    region = image.crop((x, y, math.ceil(right), math.ceil(bottom)))
    edges = left - x, top - y, right - x, bottom - y
    return array(region.resize((side, side), Image.Resampling.BICUBIC, box=edges))


def from_array(values: UInt8[np.ndarray, "height width channels"]) -> Image.Image:
    """Makes a Pillow image of decoded pixels with 1 or 3 channels."""
    return Image.fromarray(values[..., 0] if values.shape[-1] == 1 else values)


def array(image: Image.Image) -> UInt8[np.ndarray, "height width channels"]:
    """Returns a Pillow image's pixels, with a channel axis even for one channel."""
    values = np.asarray(image)
    return values if values.ndim == 3 else values[..., None]
