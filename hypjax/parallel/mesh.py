"""Data parallelism: devices in a mesh, images shared out among them, parameters copied or parted.

All devices together compute what one would: the loss is that of the whole batch, and its gradient
the exact one. Images are shared out whatever their classes are, and may be embedded in slices, each
over all devices, so that activations take one slice's memory.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree

from hypjax.errors import UserError

# Of the mesh: parameters are copied along the first and parted along the second; images are
# shared out over both.
AXES = ("copies", "parts")
EVERY_DEVICE = (-1, 1)


def create_mesh(
    shape: tuple[int, int] = EVERY_DEVICE, devices: Sequence[jax.Device] | None = None
) -> Mesh:
    """The devices of a run.

    Args:
        shape: Copies of the parameters, and parts that each is cut into; −1 copies: as many as
            there are devices for.
        devices: To choose from, the first ones; None: all there are, those of one process beside
            each other.

    Raises:
        UserError: There are not as many devices, or some of a process would be left out.
    """
    copies, parts = shape
    own_choice = devices is not None
    if devices is None:
        devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    copies = len(devices) // parts if copies == -1 else copies
    chosen = devices[: copies * parts]
    processes = len({device.process_index for device in devices})
    if not chosen or len(chosen) < copies * parts:
        raise UserError(
            f"config.run.mesh is {shape}, {max(copies, 1) * parts} devices, but there are "
            f"{len(devices)}; copies times parts may be that many at most"
        )
    if processes > 1 and len(chosen) < len(devices) and not own_choice:
        raise UserError(
            f"config.run.mesh is {shape}, {len(chosen)} devices, but the {processes} processes "
            f"have {len(devices)}, of which none may be left out; make copies times parts that many"
        )
    return Mesh(np.array(chosen).reshape(copies, parts), AXES)


class Slices(NamedTuple):
    """How the images of a batch are shared out.

    Attributes:
        count: Slices, which are embedded one after the other.
        images: Of each on each device.
        devices: How many there are.
    """

    count: int
    images: int
    devices: int

    @property
    def rows(self) -> int:
        """Images of the batch and those that fill it up."""
        return self.count * self.images * self.devices


def slices(batch_size: int, mesh: Mesh, microbatch: int = 0) -> Slices:
    """Slices of a batch, of equal size, so that few images fill it up.

    Args:
        batch_size: Images.
        mesh: The devices.
        microbatch: The most images of a slice, rounded up to the devices; 0: one slice.
    """
    count = math.ceil(batch_size / microbatch) if microbatch else 1
    return Slices(count, math.ceil(batch_size / (count * mesh.size)), mesh.size)


def local_rows(mesh: Mesh, rows: int) -> range:
    """The rows that this process's devices hold of an array that is shared out."""
    places = sharded(mesh).addressable_devices_indices_map((rows,)).values()
    bounds = [place[0].indices(rows) for place in places]
    return range(min(start for start, _, _ in bounds), max(stop for _, stop, _ in bounds))


def shard(mesh: Mesh, rows: PyTree) -> PyTree:
    """Arrays with a row an image, of which each process gives `local_rows`, on all devices."""
    return jax.tree.map(
        lambda x: jax.make_array_from_process_local_data(sharded(mesh), np.asarray(x)), rows
    )


def place(tree: PyTree, sharding: NamedSharding | PyTree) -> PyTree:
    """Arrays that every process has, where they shall lie.

    Args:
        tree: The arrays.
        sharding: One for all, or a tree of them.
    """
    if isinstance(sharding, NamedSharding):
        sharding = jax.tree.map(lambda _: sharding, tree)
    return jax.tree.map(_placed, tree, sharding)


def _placed(x: Any, sharding: NamedSharding) -> jax.Array:
    if isinstance(x, jax.Array) and x.sharding == sharding:
        return x
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return jax.jit(lambda y: y, out_shardings=sharding)(x)
    if sharding.is_fully_addressable:
        return jax.device_put(x, sharding)
    x = np.asarray(x)
    return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])


def replicated(mesh: Mesh) -> NamedSharding:
    """A copy of an array on each device."""
    return NamedSharding(mesh, P())


def sharded(mesh: Mesh) -> NamedSharding:
    """An array with a row an image, shared out over the devices."""
    return NamedSharding(mesh, P(AXES))


def parameter_shardings(mesh: Mesh, tree: PyTree) -> PyTree:
    """Where parameters and what the optimiser keeps of them lie.

    Each array is parted along its longest axis that the mesh's parts divide, or copied where there
    is none.

    Args:
        mesh: The devices.
        tree: Arrays, or what has their shapes.
    """
    parts = mesh.shape[AXES[1]]

    def sharding(x: Any) -> NamedSharding:
        sizes = [size if size % parts == 0 else 0 for size in x.shape]
        if parts == 1 or not any(sizes):
            return replicated(mesh)
        axis = int(np.argmax(sizes))
        return NamedSharding(mesh, P(*[None] * axis, AXES[1]))

    return jax.tree.map(sharding, tree)


def gather(tree: PyTree) -> PyTree:
    """The arrays as this process's first device has them, put together where they are parted.

    All processes are to call it at once.
    """

    def put_together(x: Any) -> Any:
        if not isinstance(x, jax.Array) or not isinstance(x.sharding, NamedSharding):
            return x
        if not x.is_fully_replicated:
            x = jax.jit(lambda y: y, out_shardings=replicated(x.sharding.mesh))(x)
        return x.addressable_data(0)

    return jax.tree.map(put_together, tree)


def map_images(
    function: Callable[..., PyTree], mesh: Mesh, count: int = 1
) -> Callable[..., PyTree]:
    """The function, each device applying it to its own images.

    Several slices are embedded one after the other; what lies between is not kept for the gradient,
    but computed again, slice by slice.

    Args:
        function: From parameters and arrays with a row an image to arrays with a row an image, each
            of which depends on its own image alone.
        mesh: The devices.
        count: Slices.

    Returns:
        The same function of all images, to be called while tracing. What it returns is on every
        device.
    """

    def of_own(params: PyTree, *images: PyTree) -> PyTree:
        if count == 1:
            return function(params, *images)
        by_slice = jax.tree.map(lambda x: x.reshape(count, -1, *x.shape[1:]), images)
        remembering_none = jax.checkpoint(
            lambda images: function(params, *images), prevent_cse=False
        )
        outputs = jax.lax.map(remembering_none, by_slice)
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), outputs)

    shared = map_local_images(of_own, mesh)

    def of_all(params: PyTree, *images: PyTree) -> PyTree:
        return jax.lax.with_sharding_constraint(shared(params, *images), replicated(mesh))

    return of_all


def map_local_images(function: Callable[..., PyTree], mesh: Mesh) -> Callable[..., PyTree]:
    """The function, each device applying it to its own images and keeping what it returns.

    Args:
        function: As of `map_images`.
        mesh: The devices.
    """

    def of_all(params: PyTree, *images: PyTree) -> PyTree:
        specs = (P(), *(P(AXES) for _ in images))
        # Were replication tracked, gradients that bfloat16 products make of the parameters would be
        # summed over the devices in bfloat16, before they are float32 again.
        shared = jax.shard_map(
            function, mesh=mesh, in_specs=specs, out_specs=P(AXES), check_vma=False
        )
        return shared(params, *images)

    return of_all
