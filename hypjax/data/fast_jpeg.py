"""The fast decoder: decodes JPEGs no larger than a view needs, by libjpeg-turbo directly.

An image with many more pixels than a view shows is decoded at a half, a quarter or an eighth of its
size, which JPEG's cosine transform does at a fraction of the cost. The result is still at least
twice as large as the view, and is then resized in one call. Pixels differ from the exact ones by a
few levels, so the option is part of a run's identity (`data.decoder`).
"""

import io
import math

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from hypjax.data import pixels
from hypjax.errors import UserError

_JPEG = b"\xff\xd8"
_SPACES = {1: "GRAY", 3: "RGB"}
_COLOURS = ("YCbCr", "RGB", "Gray")  # Pillow converts others differently.
_MIN_RATIO = 2  # Smallest ratio of the reduced image to the view.


def require() -> None:
    """Checks that the fast decoder's library is installed.

    Raises:
        UserError: If it is not.
    """
    try:
        import simplejpeg  # noqa: F401
    except ImportError as error:
        raise UserError(
            "config.data.decoder is fast, which needs simplejpeg: pip install simplejpeg"
        ) from error


def view(
    encoded: bytes, channels: int, box: tuple[float, float, float, float], side: int, upright: bool
) -> UInt8[np.ndarray, "side side channels"] | None:
    """Decodes a box of a JPEG and resizes it to a square.

    Args:
        encoded: The file's bytes.
        channels: 1 for greyscale, 3 for RGB.
        box: Top, left, height and width, in pixels of the whole image.
        side: Side of the square.
        upright: Whether EXIF's orientation applies.

    Returns:
        The pixels, or None if only the exact decoder can read the file.
    """
    import simplejpeg

    if not encoded.startswith(_JPEG) or (upright and _is_rotated(encoded)):
        return None
    try:
        height, width, colours, _ = simplejpeg.decode_jpeg_header(encoded)
        if colours not in _COLOURS:
            return None
        if box[0] + box[2] > height or box[1] + box[3] > width:
            return None  # Not the expected image; the exact decoder reports it.
        factor = _factor(min(box[2:]) / (_MIN_RATIO * side))
        decoded = simplejpeg.decode_jpeg(
            encoded,
            _SPACES[channels],
            min_height=math.ceil(height / factor),
            min_width=math.ceil(width / factor),
        )
    except ValueError:  # Damaged; the exact decoder reports it.
        return None
    # Reduced pixels are `factor` pixels wide, even if the last ones extend beyond the image.
    top, bottom = box[0] / factor, (box[0] + box[2]) / factor
    left, right = box[1] / factor, (box[1] + box[3]) / factor
    y, x = math.floor(top), math.floor(left)
    part = decoded[y : math.ceil(bottom), x : math.ceil(right)]
    return pixels.array(
        pixels.from_array(part).resize(
            (side, side), Image.Resampling.BICUBIC, box=(left - x, top - y, right - x, bottom - y)
        )
    )


def _factor(ratio: float) -> int:
    """Returns the largest power of two, from 1 to 8, that is at most the ratio, or else 1."""
    return 2 ** min(3, max(0, math.floor(math.log2(ratio))))


def _is_rotated(encoded: bytes) -> bool:
    return pixels.exif_orientation(Image.open(io.BytesIO(encoded))) != 1
