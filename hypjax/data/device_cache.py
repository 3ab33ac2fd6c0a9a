"""The device cache: training images decoded once into the memory of every device.

Input is then a few numbers a batch, which boxes of which images, and `resizing.cut` does the rest.
"""

import concurrent.futures
import dataclasses
import functools
from collections.abc import Callable, Generator, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import tqdm
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Int, Shaped, UInt8
from ml_collections import ConfigDict
from PIL import Image

from hypjax import parallel
from hypjax.data import pixels
from hypjax.data.dataset import Dataset
from hypjax.data.device_crops import Store
from hypjax.data.plans import Plan
from hypjax.errors import UserError
from hypjax.system import console, memory
from hypjax.system.cores import usable_cores
from hypjax.types import Batch, Crops

_PART = 2**27  # Bytes that are decoded before they are copied to the devices.
_LEAST_PARTS = 16
_SHARE = 0.8  # Of free memory, which images may take; the model and its activations need some too.
_NO_BOX = (0, 0, 1, 1)  # Of what fills a batch up, one pixel.


@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """Where images lie in a store.

    Attributes:
        sizes: Height and width of each image.
        turned: Which of them are stored with rows for columns.
        channels: 1 or 3.
    """

    sizes: Int[np.ndarray, "images 2"]
    turned: Bool[np.ndarray, " images"]
    channels: int

    @functools.cached_property
    def _stored(self) -> Int[np.ndarray, "images 2"]:
        """Rows and columns of each image as it is stored."""
        sizes = np.asarray(self.sizes, np.int64)
        return np.where(self.turned[:, None], sizes[:, ::-1], sizes)

    @functools.cached_property
    def first(self) -> Int[np.ndarray, " images"]:
        """First row of each image."""
        return np.cumsum(self._stored[:, 0]) - self._stored[:, 0]

    @property
    def length(self) -> int:
        """Most rows of an image."""
        return int(self._stored[:, 0].max())

    @property
    def breadth(self) -> int:
        """Most columns of an image, which all are filled up to."""
        return int(self._stored[:, 1].max())

    @functools.cached_property
    def part(self) -> int:
        """Rows that are copied to the devices at once; as many lie free after the last image."""
        rows = int(self._stored[:, 0].sum())
        most = min(_PART // (self.channels * self.breadth), rows // _LEAST_PARTS)
        return max(self.length, most)

    @property
    def shape(self) -> tuple[int, int]:
        """That of the store's pixels."""
        return int(self._stored[:, 0].sum()) + self.part, self.channels * self.breadth

    @property
    def bytes(self) -> int:
        """What the store takes of each device."""
        rows, width = self.shape
        return rows * width

    def parts(self) -> Iterator[range]:
        """Images that are copied to the devices together."""
        ends = np.cumsum(self._stored[:, 0])
        start = 0
        while start < len(ends):
            stop = int(np.searchsorted(ends, self.first[start] + self.part, side="right"))
            yield range(start, stop)
            start = stop

    def write(
        self, part: UInt8[np.ndarray, "part width"], row: int, i: int, image: Image.Image
    ) -> None:
        """Writes an image's pixels into some rows, the first of which is `row` of the store."""
        values = pixels.array(image)
        values = values.swapaxes(0, 1) if self.turned[i] else values
        rows, columns = self._stored[i]
        first = self.first[i] - row
        place = part[first : first + rows].reshape(rows, self.channels, self.breadth)
        place[:, :, :columns] = values.swapaxes(1, 2)

    def crops(self, plan: Plan, rows: range) -> Crops:
        """What some rows of a batch are cut from, those after the last filled up."""
        return Crops(
            row=_own(self.first[plan.ids].astype(np.int32), rows, 0),
            turned=_own(self.turned[plan.ids], rows, False),
            boxes=_own(plan.boxes, rows, _NO_BOX),
        )


def lay_out(sizes: Int[np.ndarray, "images 2"], channels: int) -> Layout:
    """Lays images out so that they take less: all upright, or all lying."""
    height, width = sizes[:, 0], sizes[:, 1]
    choices = (Layout(sizes, turned, channels) for turned in (height < width, height > width))
    return min(choices, key=lambda layout: layout.bytes)


def stored_sizes(
    sizes: Int[np.ndarray, "images 2"], stored_side: int | None
) -> Int[np.ndarray, "images 2"]:
    """Heights and widths of images whose shorter sides are scaled down to a length.

    Args:
        sizes: Their own.
        stored_side: The length; shorter ones stay. None: all do.
    """
    if stored_side is None:
        return sizes
    shorter = sizes.min(axis=1, keepdims=True)
    scaled = np.rint(sizes * (stored_side / shorter)).astype(sizes.dtype)
    return np.where(shorter > stored_side, scaled, sizes)


def plan_store(config: ConfigDict, dataset: Dataset, mesh: Mesh) -> Layout | None:
    """Where training images are to lie on each device; None: `run.cache` leaves them on the host.

    Raises:
        UserError: They do not fit.
    """
    if config.run.cache != "device":
        return None
    channels = config.data.channels
    layout = lay_out(stored_sizes(dataset.sizes, config.data.stored_side), channels)
    free = memory.free(mesh)
    if free is not None and layout.bytes > _SHARE * free:
        kind = mesh.devices.flat[0].device_kind
        side = _fitting_side(layout.sizes, channels, _SHARE * free)
        smaller = "" if side is None else f"set --config.data.stored_side={side} or less, or "
        raise UserError(
            f"config.run.cache is device, but the training images take {_bytes(layout.bytes)}, and "
            f"of {_bytes(free)} that are free on each device ({kind}) they may take {_SHARE:.0%}; "
            f"{smaller}set --config.run.cache=host"
        )
    return layout


def _fitting_side(sizes: Int[np.ndarray, "images 2"], channels: int, room: float) -> int | None:
    """The largest length of shorter sides with which images fit; None: there is none."""
    fits, fails = 0, int(sizes.min(axis=1).max())
    while fails - fits > 1:
        side = (fits + fails) // 2
        if lay_out(stored_sizes(sizes, side), channels).bytes <= room:
            fits = side
        else:
            fails = side
    return fits or None


def _bytes(number: float) -> str:
    return tqdm.tqdm.format_sizeof(number, "B")


def fill(layout: Layout, dataset: Dataset, mesh: Mesh) -> Store:
    """Decodes images into the memory of every device, scaled where the layout has them smaller.

    Raises:
        UserError: An image cannot be read, or there is no memory.
    """
    everywhere = parallel.replicated(mesh)
    put = jax.jit(_put, donate_argnums=0, out_shardings=everywhere)
    bar = tqdm.tqdm(
        total=len(dataset), desc="decoding images once", unit="image", disable=None, leave=False
    )
    with (
        memory.explained("data.stored_side, or set run.cache=host"),
        bar,
        concurrent.futures.ThreadPoolExecutor(usable_cores()) as pool,
    ):
        store = jax.jit(lambda: jnp.zeros(layout.shape, jnp.uint8), out_shardings=everywhere)()
        for images in layout.parts():
            row = layout.first[images.start]
            part = np.zeros((layout.part, layout.shape[1]), np.uint8)
            decode = functools.partial(_decode, layout, dataset, part, row)
            for _ in pool.map(decode, images):
                bar.update()
            part, row = parallel.place((part, np.int32(row)), everywhere)
            store = put(store, part, row)
        store.block_until_ready()
    console.say(f"the training images take {_bytes(layout.bytes)} of each device")
    return Store(store, layout.length, layout.channels)


def _decode(layout: Layout, dataset: Dataset, part: np.ndarray, row: int, i: int) -> None:
    image = dataset.image(i, layout.channels)
    height, width = (int(length) for length in layout.sizes[i])
    if image.size != (width, height):
        image = image.resize((width, height), Image.Resampling.BICUBIC)
    layout.write(part, row, i, image)


def _put(store: Array, part: Array, row: Array) -> Array:
    return jax.lax.dynamic_update_slice(store, part, (row, jnp.zeros_like(row)))


def crop_batches(
    layout: Layout, plan: Callable[[int], Plan], steps: range, rows: range
) -> Generator[Batch, None, None]:
    """Yields the batches of some steps, for the device to crop.

    Images and flips are those of some rows of a batch, labels and ids those of all.

    Args:
        layout: Where images lie.
        plan: Which images, and which boxes of them, a step wants.
        steps: Steps to yield, counted from 0.
        rows: Which images of each batch, filled up after its last.
    """
    for step in steps:
        planned = plan(step)
        yield Batch(
            images=layout.crops(planned, rows),
            labels=planned.labels,
            ids=planned.ids,
            flips=_own(planned.flips, rows, False),
        )


def _own(
    values: Shaped[np.ndarray, "batch ..."], rows: range, filling: object
) -> Shaped[np.ndarray, "rows ..."]:
    """Some rows, and a filling for those that there are not."""
    own = np.empty((len(rows), *values.shape[1:]), values.dtype)
    own[:] = filling
    there = values[rows.start : rows.stop]
    own[: len(there)] = there
    return own
