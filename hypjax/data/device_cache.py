"""The device cache: training images decoded once into the memory of every device."""

import concurrent.futures
import dataclasses
import functools
import math
from collections.abc import Callable, Generator, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Int, UInt8

from hypjax import parallel
from hypjax.data import pixels
from hypjax.data.dataset import Dataset
from hypjax.data.device_crops import Store
from hypjax.data.plans import Plan, padded_rows
from hypjax.errors import UserError
from hypjax.system import console, machine
from hypjax.system.progress import Bar
from hypjax.types import Batch, Crops

_SLAB_BYTES = 2**27  # Bytes copied to the devices at once; the host holds as many in memory.
_MIN_SLABS = 16  # Bounds the free rows at the end of the cache, which are one slab.
_MAX_SHARE = 0.8  # Share of free memory for images; the model and its activations need the rest.
_in_bytes = functools.partial(Bar.format_sizeof, suffix="B")  # Such as '1.25MB'.


@dataclasses.dataclass(frozen=True, eq=False)
class CacheLayout:
    """Layout of the device cache: images below each other, all padded to one width."""

    sizes: Int[np.ndarray, "images 2"]  # Heights and widths.
    transposed: Bool[np.ndarray, " images"]  # Whether an image is stored transposed.
    stored_sizes: Int[np.ndarray, "images 2"]  # Rows and columns as stored.
    end_rows: Int[np.ndarray, " images"]  # First row after each image.
    max_rows: int  # Rows of the tallest stored image.
    slab_rows: int  # Rows that are copied to the devices at once.
    channels: int  # 1 or 3.
    shape: tuple[int, int]  # Rows, and bytes of a row, which holds its channels one by one.

    def slabs(self) -> Iterator[tuple[int, range]]:
        """Yields each slab's first row in the cache, and its range of images."""
        start = 0
        while start < len(self.end_rows):
            first_row = self.end_rows[start] - self.stored_sizes[start, 0]
            stop = int(np.searchsorted(self.end_rows, first_row + self.slab_rows, side="right"))
            yield first_row, range(start, stop)
            start = stop

    def decode(
        self, dataset: Dataset, slab: UInt8[np.ndarray, "rows width"], slab_start: int, i: int
    ) -> None:
        """Decodes the i-th image into a slab that begins at row `slab_start` of the cache."""
        size = tuple(self.sizes[i].tolist())
        values = pixels.array(pixels.scaled(dataset.image(i, self.channels), size))
        values = values.swapaxes(0, 1) if self.transposed[i] else values
        rows, columns = self.stored_sizes[i]
        end = self.end_rows[i] - slab_start
        target = slab[end - rows : end].reshape(rows, self.channels, -1)
        target[:, :, :columns] = values.swapaxes(1, 2)

    def crops(self, plan: Plan, rows: range) -> Crops:
        """Returns the crops of the given rows of a batch, padded beyond the batch's end."""
        first_rows = self.end_rows[plan.ids] - self.stored_sizes[plan.ids, 0]
        return Crops(
            row=padded_rows(first_rows.astype(np.int32), rows, 0),
            transposed=padded_rows(self.transposed[plan.ids], rows, False),
            boxes=padded_rows(plan.boxes, rows, (0, 0, 1, 1)),  # Padding shows one pixel.
        )


def _lay_out(
    sizes: Int[np.ndarray, "images 2"], transposed: np.ndarray, channels: int
) -> CacheLayout:
    stored_sizes = np.where(transposed[:, None], sizes[:, ::-1], sizes).astype(np.int64)
    end_rows = np.cumsum(stored_sizes[:, 0])
    max_rows, max_columns = stored_sizes.max(axis=0).tolist()
    # One compiled program writes all slabs, so all have `slab_rows` rows. The last slab may
    # extend beyond the last image, so the cache ends with `slab_rows` free rows.
    fitting_rows = _SLAB_BYTES // (channels * max_columns)
    slab_rows = max(max_rows, min(fitting_rows, int(end_rows[-1]) // _MIN_SLABS))
    shape = int(end_rows[-1]) + slab_rows, channels * max_columns
    columns = sizes, transposed, stored_sizes, end_rows
    return CacheLayout(*columns, max_rows, slab_rows, channels, shape)


def plan_layout(sizes: Int[np.ndarray, "images 2"], mesh: Mesh, channels: int) -> CacheLayout:
    """Chooses the smaller layout, all images in portrait or all in landscape, if it fits."""
    height, width = sizes[:, 0], sizes[:, 1]
    layouts = [_lay_out(sizes, swap, channels) for swap in (height < width, height > width)]
    layout = min(layouts, key=lambda layout: math.prod(layout.shape))
    # A crop pads its image to a square of float32, which a single very long image makes large.
    extent = max(layout.max_rows, layout.shape[1] // channels)
    needed, free = math.prod(layout.shape) + 4 * channels * extent**2, machine.free_memory(mesh)
    if free is not None and needed > _MAX_SHARE * free:
        kind = mesh.devices.flat[0].device_kind
        raise UserError(
            f"the training images and a crop of the longest take {_in_bytes(needed)}, more than "
            f"{_MAX_SHARE:.0%} of the {_in_bytes(free)} free on each device ({kind}); set "
            "--config.run.cache=host, or lower config.data.stored_side (with "
            "config.data.train_view=area_crop)"
        )
    return layout


def fill(layout: CacheLayout, dataset: Dataset, mesh: Mesh) -> Store:
    """Decodes images, scaled down to the layout's sizes, into the memory of every device."""
    replicated = parallel.replicated(mesh)

    @functools.partial(jax.jit, donate_argnums=0, out_shardings=replicated)
    def put(store: Array, slab: Array, first_row: Array) -> Array:
        return jax.lax.dynamic_update_slice(store, slab, (first_row, jnp.zeros_like(first_row)))

    options = {"desc": "decoding images once", "unit": "image", "disable": None, "leave": False}
    with (
        machine.memory_explained("the size of stored images, or set run.cache=host"),
        Bar(total=len(dataset), **options) as bar,
        concurrent.futures.ThreadPoolExecutor(machine.usable_cores()) as pool,
    ):
        store = jax.jit(lambda: jnp.zeros(layout.shape, jnp.uint8), out_shardings=replicated)()
        for slab_start, images in layout.slabs():
            slab = np.zeros((layout.slab_rows, layout.shape[1]), np.uint8)
            for _ in pool.map(functools.partial(layout.decode, dataset, slab, slab_start), images):
                bar.update()
            store = put(store, *parallel.place((slab, np.int32(slab_start)), replicated))
        store.block_until_ready()
    console.say(f"the training images take {_in_bytes(math.prod(layout.shape))} on each device")
    return Store(store, layout.max_rows, layout.channels)


def crop_batches(
    layout: CacheLayout, plans: Callable[[int], Plan], steps: range, rows: range
) -> Generator[Batch, None, None]:
    """Yields batches like `training_batches`, with crops for the device in place of pixels."""
    for plan in map(plans, steps):
        yield plan.batch(layout.crops(plan, rows), rows)
