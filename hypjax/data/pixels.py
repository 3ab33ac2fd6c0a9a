"""Decodes images on the host, exactly or fast, and resizes crops."""

import contextlib
import functools
import io
import math
import os
import pathlib
import re
import stat
import threading
from typing import Any

import numpy as np
import PIL
from jaxtyping import UInt8
from PIL import ExifTags, Image, ImageOps, TiffImagePlugin, UnidentifiedImageError, features

from hypjax.errors import UserError, installation
from hypjax.types import Frame

with contextlib.suppress(ImportError):  # The extra `heif`.
    import pillow_heif

    pillow_heif.register_heif_opener()

HEIF_INSTALLATION = installation("hypjax[heif]")
# Version of `decode` and of the libraries that determine its pixels; part of cache names.
DECODER = f"2-{PIL.__version__}-{features.version('libjpeg_turbo') or features.version('jpg')}"
_MODES = {1: "L", 3: "RGB"}  # Pillow's modes by number of channels.
_CHANNELS = ((), (1,), (2,), (3,), (4,))  # Shapes of users' pixels after height and width.
_JPEG = b"\xff\xd8"  # First bytes of a JPEG file.
_HEIF = re.compile(rb".{4}ftyp(he[iv]|mif1|msf1)", re.DOTALL)  # First bytes of a HEIC file.
_BITS, _PHOTOMETRIC, _MAX_VALUE, _PALETTE = 258, 262, 281, 320  # Tags of TIFF.
_MAX_ENLARGEMENT = 8  # Of an image's pixels, beyond which only the pixels of a box are computed.
_MIN_RATIO = 2  # A box decoded at a reduced size has at least so many times the square's side.
_MIN_REGION = 32  # Least side of a region, in pixels, if the image is as large (HyCoCLIP).
# Formats that Pillow registers without a decoder, or that hold no pixels.
_NO_IMAGES = {"BUFR", "EPS", "GRIB", "HDF5", "IPTC", "MPEG", "WMF"}
LARGEST_FILE = 2**30  # Bytes; larger files are not read into memory.
# Decoding takes up to 10 bytes per pixel, so the threads of a process take turns with large images.
_LARGE_IMAGE = 50_000_000  # Pixels.
_DECODING_LARGE = threading.Lock()


@functools.cache
def image_suffixes() -> frozenset[str]:
    """Returns the suffixes of all image formats that Pillow reads."""
    suffixes = Image.registered_extensions().items()  # Loads all plugins, which fill Image.OPEN.
    formats = Image.OPEN.keys() - _NO_IMAGES | {"MPO"}  # Pillow's reader of JPEG opens MPO.
    return frozenset(suffix for suffix, name in suffixes if name in formats)


def decode(
    content: bytes | Image.Image | np.ndarray,
    channels: int,
    *,
    upright: bool = False,
    min_side: int | None = None,
) -> Image.Image:
    """Decodes the bytes of an image file exactly, or converts a Pillow image or a user's pixels.

    Transparent images are drawn on white, more bits are scaled to 8, and only the first frame is
    read. With `upright`, files are rotated as EXIF says, like viewers do; protocols of datasets,
    and therefore published results, ignore EXIF. With `min_side`, a JPEG is decoded at a fraction
    of its size whose sides have at least so many pixels. Damaged files raise almost any exception.
    """
    if isinstance(content, Image.Image):
        content = _of_8_bits(content)  # A rotated image has no tags.
        with contextlib.suppress(Exception):  # EXIF data may be damaged, as in `_converted`.
            content = ImageOps.exif_transpose(content)
        return _converted(content, channels, upright=False)
    if not isinstance(content, bytes):
        return _converted(from_pixels(np.asarray(content), "it"), channels, upright)
    try:
        image = Image.open(io.BytesIO(content))
    except UnidentifiedImageError as error:
        if content.startswith(tuple(TiffImagePlugin.PREFIXES)):
            kind = "it is damaged, or a TIFF of a kind that Pillow cannot read"
            raise ValueError(f"{kind}; save it as grey or RGB, with 8 or 16 bits") from error
        heic = f"HEIC needs {HEIF_INSTALLATION}"
        raise ValueError(heic if _HEIF.match(content) else "not an image") from error
    except Image.DecompressionBombError as error:
        max_pixels = f"{2 * (Image.MAX_IMAGE_PIXELS or 0):,} pixels"
        raise ValueError(f"more than {max_pixels}; scale it down or remove it") from error
    if min_side is not None:
        image.draft(None, (min_side, min_side))
    large = image.width * image.height > _LARGE_IMAGE
    with _DECODING_LARGE if large else contextlib.nullcontext():
        return _converted(image, channels, upright)


def _of_8_bits(image: Image.Image) -> Image.Image:
    """Scales greys of more than 8 bits, white to 255; Pillow scales other modes when it reads them.

    White is 2**bits − 1, or 0 if a tag says so. Bits are 16 in PNG, JPEG 2000 and PGM, whose
    maximum Pillow scales to 2¹⁶ − 1. In TIFF they are those of BitsPerSample, or of MaxSampleValue,
    if that is such a white: some programs write the largest value of the pixels instead.
    """
    tags, info = getattr(image, "tag_v2", {}), image.info
    if image.mode.startswith("I;16") or (image.mode, image.format) == ("I", "PPM"):
        bits, declared = tags.get(_BITS, (16,))[0], tags.get(_MAX_VALUE, (0,))[0]
        bits = next((n for n in range(8, bits) if declared == 2**n - 1), bits)
        white, values = 2**bits - 1, np.asarray(image)
        values = np.where(values == info.get("transparency"), white, values.clip(0, white))
        values = (values >> (bits - 8)).astype(np.uint8)
        image = Image.fromarray(255 - values if tags.get(_PHOTOMETRIC) == 0 else values)
        image.info = {key: value for key, value in info.items() if key != "transparency"}
    elif image.mode in ("P", "PA") and 0 < max(tags.get(_PALETTE, (0,))) < 256:
        # Pillow expects colours up to 65535. libtiff takes such small ones for 8 bits, too.
        image = image.copy()
        image.putpalette(np.reshape(tags[_PALETTE], (3, -1)).T.astype(np.uint8).tobytes())
    elif image.mode in ("I", "F"):
        problem = "its pixels are signed, floating-point or of 32 bits, so their white is unknown"
        raise ValueError(f"{problem}; save it with 8 or 16 bits")
    return image


def _converted(image: Image.Image, channels: int, upright: bool) -> Image.Image:
    """Rotates an image if `upright`, and converts it to the mode of `channels`."""
    image = _of_8_bits(image)
    if upright:
        image.load()
        # Pillow raises almost anything on damaged EXIF data, before it rotates, when it reads them,
        # or afterwards, when it writes them without the orientation. Either error is harmless.
        with contextlib.suppress(Exception):
            ImageOps.exif_transpose(image, in_place=True)
    if image.mode == "La":  # Pillow converts this mode to LA only.
        image = image.convert("LA")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    if image.mode != _MODES[channels]:
        return image.convert(_MODES[channels])
    image.load()
    return image


def from_pixels(values: np.ndarray, name: object) -> Image.Image:
    """Converts a user's pixels to a Pillow image, or raises a UserError that names them `name`."""
    dtype = values.dtype.newbyteorder("=")
    is_image = values.size > 0 and values.ndim >= 2 and values.shape[2:] in _CHANNELS
    if not is_image or dtype not in (np.bool_, np.uint8, np.uint16):
        needed = "pixels are uint8, uint16 or bool, [height, width] or [height, width, 1 to 4]"
        raise UserError(f"{name} is {values.dtype} of shape {list(values.shape)}; {needed}")
    if dtype == np.bool_:
        values = values * np.uint8(255)
    elif dtype == np.uint16:  # Pillow scales colours of 16 bits like this, and `_converted` greys.
        values = (values >> 8).astype(np.uint8)
    return from_array(values)


def read_bytes(path: str | os.PathLike[str]) -> bytes:
    """Reads a regular file; raises OSError if it is none, cannot be read, or is too large."""
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):  # Pipes may block, and devices may never end.
        raise OSError("not a regular file")
    if not status.st_size:  # Files of /proc, which may block, too.
        return b""
    if status.st_size > LARGEST_FILE:
        raise OSError(f"larger than {LARGEST_FILE} bytes")
    return pathlib.Path(path).read_bytes()


def read_image(path: str, channels: int, min_side: int | None = None) -> Image.Image:
    """Reads an image file and decodes it upright, see `decode`."""
    return decode(read_bytes(path), channels, upright=True, min_side=min_side)


def region(image: Image.Image, box: tuple[int, int, int, int]) -> Image.Image:
    """Crops a box (left, top, right, bottom) of an image, and pads it to a square with white.

    Boxes are cut at the image's edges, and widened to 32 pixels as in HyCoCLIP's code. Raises
    ValueError if the box is not in the image.
    """
    edges = []
    for first, last, length in zip(box[:2], box[2:], image.size, strict=True):
        first, last = max(first, 0), min(last, length)
        if first >= last:
            raise ValueError(f"its box {[*box]} is not in the image")
        side = min(max(last - first, _MIN_REGION), length)
        first = min(max((first + last - side) // 2, 0), length - side)
        edges.append((first, first + side))
    (left, right), (top, bottom) = edges
    cropped = image.crop((left, top, right, bottom))
    return ImageOps.pad(cropped, (max(cropped.size),) * 2, color="white")


def scaled(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    """Resizes an image to (height, width), unless it already has that size."""
    height, width = size
    if image.size == (width, height):
        return image
    return image.resize((width, height), Image.Resampling.BICUBIC)


def resize(image: Image.Image, side: int) -> UInt8[np.ndarray, "side side channels"]:
    """Resizes an image to a square with Pillow's bicubic filter and antialiasing."""
    return array(scaled(image, (side, side)))


def show(image: Image.Image, frame: Frame, side: int) -> UInt8[np.ndarray, "side side channels"]:
    """Resizes an image to the frame's size, crops the frame's box, and resizes that to a square.

    Computes no pixels of a greatly enlarged image outside the box: a line of 20,000 × 1 pixels,
    enlarged to a height of 256, would take gigabytes. The pixels are the same.
    """
    top, left, height, width = frame.box
    new_height, new_width = frame.size
    grows = new_height >= image.height and new_width >= image.width
    limit = _MAX_ENLARGEMENT * max(image.height * image.width, height * width)
    if grows and new_height * new_width > limit:
        region = from_array(enlarged_box(array(image), frame))
    else:
        region = scaled(image, (new_height, new_width)).crop(
            (left, top, left + width, top + height)
        )
    return resize(region, side)


def enlarged_box(
    values: UInt8[np.ndarray, "rows columns channels"], frame: Frame
) -> UInt8[np.ndarray, "height width channels"]:
    """Crops a frame's box out of an enlarged image, of which it computes only the box.

    Pillow resizes the columns, then the rows, in whole numbers: weights are multiples of 2⁻²², and
    each sum is rounded to 8 bits.
    """
    for axis in (1, 0):
        length, new_length = values.shape[axis], frame.size[axis]
        positions = np.arange(frame.box[axis], frame.box[axis] + frame.box[2 + axis])
        centres = (positions + 0.5) * (length / new_length)
        first, last = max(0, int(centres[0]) - 2), min(length, int(centres[-1]) + 3)
        weights = bicubic(np.abs(np.arange(first, last) + 0.5 - centres[:, None]))
        weights /= weights.sum(axis=1, keepdims=True)
        weights = np.rint(weights * 2**22)
        part = np.moveaxis(values, axis, 0)[first:last]
        sums = np.floor(np.tensordot(weights, part, 1) / 2**22 + 0.5)
        values = np.moveaxis(sums.clip(0, 255).astype(np.uint8), 0, axis)
    return values


def bicubic(t: Any, numpy: Any = np) -> Any:
    """Pillow's bicubic filter (Keys with a = −1/2) at distances t ≥ 0, for NumPy or jax.numpy."""
    near = (1.5 * t - 2.5) * t * t + 1
    far = ((2.5 - 0.5 * t) * t - 4) * t + 2
    return numpy.where(t < 1, near, numpy.where(t < 2, far, 0))


def show_fast(
    encoded: bytes, channels: int, box: tuple[float, float, float, float], side: int, upright: bool
) -> UInt8[np.ndarray, "side side channels"] | None:
    """Decodes a box (top, left, height, width) of a JPEG at a reduced size, and resizes it.

    JPEG's cosine transform decodes cheaply at a half, a quarter or an eighth of the size. It is
    reduced while the box stays at least twice as large as the square. Pixels differ from exact ones
    by a few levels, so the decoder is part of a run's identity (`data.decoder`). Returns None for
    files that only the exact decoder reads and, with `upright`, for rotated images.
    """
    if not isinstance(encoded, bytes) or not encoded.startswith(_JPEG):
        return None
    top, left, height, width = box
    bottom, right = top + height, left + width
    try:
        image: Image.Image = Image.open(io.BytesIO(encoded))
        if upright and image.getexif().get(ExifTags.Base.Orientation, 1) != 1:
            return None
        if image.mode not in _MODES.values() or bottom > image.height or right > image.width:
            return None
        halvings = math.floor(math.log2(min(height, width) / (_MIN_RATIO * side)))
        factor = 2 ** min(3, max(0, halvings))
        image.draft(_MODES[channels], (image.width // factor, image.height // factor))
        image = image if image.mode == _MODES[channels] else image.convert(_MODES[channels])
        image.load()
    except Exception:  # Decoders raise almost anything on damaged files.
        return None
    # Reduced pixels are `factor` pixels wide, even if the last ones extend beyond the image.
    top, left, bottom, right = (edge / factor for edge in (top, left, bottom, right))
    y, x = math.floor(top), math.floor(left)
    region = image.crop((x, y, math.ceil(right), math.ceil(bottom)))
    box_in_region = left - x, top - y, right - x, bottom - y
    return array(region.resize((side, side), Image.Resampling.BICUBIC, box=box_in_region))


def from_array(values: UInt8[np.ndarray, "height width channels"]) -> Image.Image:
    """Makes a Pillow image of uint8 pixels; one channel becomes a greyscale image."""
    return Image.fromarray(values[..., 0] if values.shape[2:] == (1,) else values)


def array(image: Image.Image) -> UInt8[np.ndarray, "height width channels"]:
    """Returns a Pillow image's pixels, with a channel axis even for one channel."""
    values = np.asarray(image)
    return values if values.ndim == 3 else values[..., None]
