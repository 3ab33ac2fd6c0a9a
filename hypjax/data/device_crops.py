"""Crops from the device cache, computed by the train step.

Pillow resizes along one axis, then along the other, and rounds to whole levels after each pass.
`crop` does the same with two matrix products per image, whose weights depend on the box. Only the
precision of sums differs, so that a level is occasionally off by one. In contrast,
`jax.image.scale_and_translate` rounds once, and mixes pixels from beyond the edge into a box.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import PIL
from jaxtyping import Array, Float, Int, Shaped, UInt8

from hypjax.data.pixels import bicubic
from hypjax.types import Crops

_MAX_IMAGES = 32  # Images resized at the same time.
_MAX_BYTES = 2**27  # Limits the memory of these images' pixels as float32.
# Whether Pillow chooses which axis to resize first; before, it was always the horizontal one.
_PILLOW_CHOOSES_AXIS = int(PIL.__version__.split(".")[0]) >= 13


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["pixels"], meta_fields=["length", "channels"]
)
@dataclasses.dataclass(frozen=True)
class Store:
    """Images in device memory, below each other, some of them transposed."""

    pixels: UInt8[Array, "rows channels*width"]  # Devices would pad a separate channel axis.
    length: int  # Rows of the tallest image; as many follow the first row of the last image.
    channels: int  # 1 or 3.


def crop(store: Store, crops: Crops, side: int) -> UInt8[Array, "crops side side channels"]:
    """Crops boxes of stored images and resizes them to squares of `side` pixels."""
    # Slices fit in memory as float32, and have equal sizes, so that one program computes them all.
    total = len(crops.row)
    extent = max(store.length, store.pixels.shape[1] // store.channels)
    fitting_images = _MAX_BYTES // (4 * store.channels * extent**2)
    num_slices = math.ceil(total / max(1, min(_MAX_IMAGES, fitting_images)))
    slice_size = math.ceil(total / num_slices)
    indices = jnp.arange(num_slices * slice_size).reshape(num_slices, slice_size) % total
    slices = jax.tree.map(lambda x: x[indices], crops)
    views = jax.lax.map(jax.vmap(functools.partial(_crop, store, side)), slices)
    return views.reshape(-1, *views.shape[2:])[:total]


def _crop(store: Store, side: int, crop: Crops) -> UInt8[Array, "side side channels"]:
    """Crops and resizes one box, first along the last axis, then along the first."""
    vertical, horizontal = crop.boxes[0::2], crop.boxes[1::2]  # Start and length along each axis.
    # Pillow resizes the vertical axis first if that removes far more pixels.
    tall = (vertical[1] > side) & (vertical[1] - side > 2 * (horizontal[1] - side))
    vertical_first = tall & _PILLOW_CHOOSES_AXIS
    planes = _planes(store, crop.row)
    planes = _transpose_where(crop.transposed ^ vertical_first, planes).astype(jnp.float32)
    extent = planes.shape[-1]
    start, size = jnp.where(vertical_first, vertical, horizontal)
    last_weights = weights(start, size, extent, side)
    start, size = jnp.where(vertical_first, horizontal, vertical)
    first_weights = weights(start, size, extent, side)
    planes = _whole_levels(_product("mcn,sn->mcs", planes, last_weights))
    planes = _whole_levels(_product("tm,mcs->tcs", first_weights, planes))
    return _transpose_where(vertical_first, planes.astype(jnp.uint8)).swapaxes(1, 2)


def _planes(store: Store, row: Int[Array, ""]) -> UInt8[Array, "extent channels extent"]:
    """Reads the image that begins at a row, padded to a square that fits every image."""
    size = store.length, store.pixels.shape[1]
    rows = jax.lax.dynamic_slice(store.pixels, (row, jnp.zeros_like(row)), size)
    planes = rows.reshape(store.length, store.channels, -1)
    height, _, width = planes.shape
    extent = max(height, width)
    return jnp.pad(planes, [(0, extent - height), (0, 0), (0, extent - width)])


def _transpose_where(condition: Array, planes: Shaped[Array, "n channels n"]) -> Array:
    return jnp.where(condition, planes.transpose(2, 1, 0), planes)


def weights(
    start: Int[Array, ""], size: Int[Array, ""], extent: int, side: int
) -> Float[Array, "side extent"]:
    """Returns the weight of each pixel of an axis in each pixel of the resized box.

    The filter is Pillow's bicubic one, widened by the scale when shrinking.
    The box has `size` pixels from `start` on; the other of the axis's `extent` pixels weigh 0.
    """
    scale = size.astype(jnp.float32) / side
    position = jnp.arange(extent) - start
    center = (jnp.arange(side, dtype=jnp.float32) + 0.5) * scale
    distance = (position + 0.5) - center[:, None]
    values = bicubic(jnp.abs(distance) / jnp.maximum(scale, 1), jnp)
    values = jnp.where((position >= 0) & (position < size), values, 0)
    return values / values.sum(axis=1, keepdims=True)


def _product(axes: str, left: Array, right: Array) -> Array:
    return jnp.einsum(axes, left, right, precision=jax.lax.Precision.HIGHEST)


def _whole_levels(values: Float[Array, "..."]) -> Float[Array, "..."]:
    """Rounds to whole levels, halves up, and clips to 0...255."""
    return jnp.clip(jnp.floor(values + 0.5), 0, 255)
