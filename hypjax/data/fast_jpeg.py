"""The fast decoder: JPEGs decoded no larger than a view of them needs, by libjpeg-turbo directly.

Where an image has many more pixels than a view shows, it is decoded at a half, a quarter or an
eighth of its size, which JPEG's cosine transform gives for a fraction of the work, still at least
twice as large as the view needs, and resized from there in one call. Pixels then differ from the
exact ones by a few levels; so the option is part of what a run is (`data.decoder`).
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
_COLOURS = ("YCbCr", "RGB", "Gray")  # Pillow makes RGB of others in its own way.
_GAP = 2  # How many times larger than the view an image is decoded at least, when reduced.
_ORIENTATION = 0x0112  # EXIF's tag.


def require() -> None:
    """Refuses the fast decoder where its library is absent.

    Raises:
        UserError: It is.
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
    """A square view of a part of a JPEG.

    Args:
        encoded: The file's bytes.
        channels: 1 for greyscale, 3 for RGB.
        box: Top, left, height and width of the part, in pixels of the whole image.
        side: Of the square.
        upright: Whether EXIF's orientation counts.

    Returns:
        Its pixels; None: this is no file for the fast decoder, take the exact one.
    """
    import simplejpeg

    if not encoded.startswith(_JPEG) or (upright and _turned(encoded)):
        return None
    try:
        height, width, colours, _ = simplejpeg.decode_jpeg_header(encoded)
        if colours not in _COLOURS:
            return None
        if box[0] + box[2] > height or box[1] + box[3] > width:
            return None  # It is another image than was expected, which the exact decoder tells.
        factor = _factor(min(box[2:]) / (_GAP * side))
        decoded = simplejpeg.decode_jpeg(
            encoded,
            _SPACES[channels],
            min_height=math.ceil(height / factor),
            min_width=math.ceil(width / factor),
        )
    except ValueError:  # Damaged: let the exact decoder judge.
        return None
    # A pixel stands for `factor` of them, also where the last ones reach beyond the image.
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
    """The largest power of two up to 8 that is at most the ratio; 1 where that is below 2."""
    return 2 ** min(3, max(0, math.floor(math.log2(ratio))))


def _turned(encoded: bytes) -> bool:
    return Image.open(io.BytesIO(encoded)).getexif().get(_ORIENTATION, 1) != 1
