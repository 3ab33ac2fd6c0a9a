"""The device cache: training images decoded once into the memory of every device."""

import concurrent.futures
import dataclasses
import functools
import math
from collections.abc import Callable, Generator, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import tqdm
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Int, UInt8

from hypjax import parallel
from hypjax.data import pixels
from hypjax.data.dataset import Dataset
from hypjax.data.device_crops import Store
from hypjax.data.plans import padded_rows
from hypjax.errors import UserError
from hypjax.system import console, machine
from hypjax.system.machine import usable_cores
from hypjax.types import Batch, Crops

_SLAB = 2**27  # Bytes copied to the devices at once; the host holds as many in memory.
_MIN_SLABS = 16
_SHARE = 0.8  # Share of free memory for images; the model and its activations need the rest.
_in_bytes = functools.partial(tqdm.tqdm.format_sizeof, suffix="B")  # Such as '1.25MB'.


@dataclasses.dataclass(frozen=True, eq=False)
class CacheLayout:
    """Layout of the device cache: images below each other, all padded to one width."""

    sizes: Int[np.ndarray, "images 2"]  # Heights and widths.
    transposed: Bool[np.ndarray, " images"]  # Whether an image is stored transposed.
    channels: int  # 1 or 3.

    @functools.cached_property
    def _stored_sizes(self) -> Int[np.ndarray, "images 2"]:  # Rows and columns as stored.
        sizes = np.asarray(self.sizes, np.int64)
        return np.where(self.transposed[:, None], sizes[:, ::-1], sizes)

    @functools.cached_property
    def _ends(self) -> Int[np.ndarray, " images"]:  # First row after each image.
        return np.cumsum(self._stored_sizes[:, 0])

    @functools.cached_property
    def first(self) -> Int[np.ndarray, " images"]:
        """First row of each image."""
        return self._ends - self._stored_sizes[:, 0]

    @functools.cached_property
    def largest(self) -> tuple[int, int]:
        """Largest numbers of rows and columns; all images are padded to the latter."""
        return tuple(self._stored_sizes.max(axis=0).tolist())

    @functools.cached_property
    def slab_rows(self) -> int:
        """Number of rows of a slab, which is copied to the devices at once."""
        # One compiled program writes all slabs, so all have the same size. The cache ends with as
        # many free rows, because the last slab extends beyond the last image.
        rows, columns = self.largest
        fitting = _SLAB // (self.channels * columns)
        return max(rows, min(fitting, int(self._ends[-1]) // _MIN_SLABS))

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the stored pixels."""
        return int(self._ends[-1]) + self.slab_rows, self.channels * self.largest[1]

    @property
    def bytes(self) -> int:
        """Memory that the images take on each device."""
        return math.prod(self.shape)

    def slabs(self) -> Iterator[range]:
        """Yields the range of images in each slab."""
        start = 0
        while start < len(self._ends):
            limit = self.first[start] + self.slab_rows
            stop = int(np.searchsorted(self._ends, limit, side="right"))
            yield range(start, stop)
            start = stop

    def decode(
        self, dataset: Dataset, slab: UInt8[np.ndarray, "rows width"], row: int, i: int
    ) -> None:
        """Decodes the i-th image into a slab that begins at `row` of the cache."""
        height, width = self.sizes[i].tolist()
        values = pixels.array(pixels.scaled(dataset.image(i, self.channels), (height, width)))
        values = values.swapaxes(0, 1) if self.transposed[i] else values
        rows, columns = self._stored_sizes[i]
        first = self.first[i] - row
        target = slab[first : first + rows].reshape(rows, self.channels, -1)
        target[:, :, :columns] = values.swapaxes(1, 2)

    def crops(self, plan: Batch, rows: range) -> Crops:
        """Returns the crops of a batch in the given rows, padded beyond the batch's end."""
        return Crops(
            row=padded_rows(self.first[plan.ids].astype(np.int32), rows, 0),
            transposed=padded_rows(self.transposed[plan.ids], rows, False),
            boxes=padded_rows(plan.images.box, rows, (0, 0, 1, 1)),  # Padding shows one pixel.
        )


def plan_layout(sizes: Int[np.ndarray, "images 2"], mesh: Mesh, channels: int) -> CacheLayout:
    """Chooses the smaller of two layouts: all images in portrait, or all in landscape format.

    Raises a `UserError` if the images do not fit into the devices' memory.
    """
    height, width = sizes[:, 0], sizes[:, 1]
    layouts = [CacheLayout(sizes, swap, channels) for swap in (height < width, height > width)]
    layout, free = min(layouts, key=lambda layout: layout.bytes), machine.free_memory(mesh)
    if free is not None and layout.bytes > _SHARE * free:
        kind = mesh.devices.flat[0].device_kind
        raise UserError(
            f"the training images take {_in_bytes(layout.bytes)}, more than {_SHARE:.0%} of the "
            f"{_in_bytes(free)} free on each device ({kind}); set --config.run.cache=host, or "
            "lower config.data.stored_side (with config.data.train_view=area_crop)"
        )
    return layout


def fill(layout: CacheLayout, dataset: Dataset, mesh: Mesh) -> Store:
    """Decodes images, scaled down to the layout's sizes, into the memory of every device."""
    replicated = parallel.replicated(mesh)

    @functools.partial(jax.jit, donate_argnums=0, out_shardings=replicated)
    def put(store: Array, slab: Array, row: Array) -> Array:
        return jax.lax.dynamic_update_slice(store, slab, (row, jnp.zeros_like(row)))

    options = {"desc": "decoding images once", "unit": "image", "disable": None, "leave": False}
    with (
        machine.memory_explained("the size of stored images, or set run.cache=host"),
        tqdm.tqdm(total=len(dataset), **options) as bar,
        concurrent.futures.ThreadPoolExecutor(usable_cores()) as pool,
    ):
        store = jax.jit(lambda: jnp.zeros(layout.shape, jnp.uint8), out_shardings=replicated)()
        for images in layout.slabs():
            row = layout.first[images.start]
            slab = np.zeros((layout.slab_rows, layout.shape[1]), np.uint8)
            decode = functools.partial(layout.decode, dataset, slab, row)
            for _ in pool.map(decode, images):
                bar.update()
            slab, row = parallel.place((slab, np.int32(row)), replicated)
            store = put(store, slab, row)
        store.block_until_ready()
    console.say(f"the training images take {_in_bytes(layout.bytes)} on each device")
    return Store(store, layout.largest[0], layout.channels)


def crop_batches(
    layout: CacheLayout, plans: Callable[[int], Batch], steps: range, rows: range
) -> Generator[Batch, None, None]:
    """Yields the batches of the given steps, counted from 0, whose images the device crops.

    Images and flips cover the given rows, padded beyond a batch's end; labels and ids cover all.
    """
    for plan in map(plans, steps):
        flips = padded_rows(plan.flips, rows, False)
        yield plan._replace(images=layout.crops(plan, rows), flips=flips)
