"""Data parallelism: a mesh of devices, sharded batches, and replicated or sharded parameters.

Results do not depend on the number of devices: the loss covers the whole batch, and its gradient is
exact. A batch may also be embedded in slices (microbatches), one after the other, so that memory
holds the activations of only one slice.
"""

import dataclasses
import functools
import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree

from hypjax.errors import UserError
from hypjax.models.layers import cuda_capability
from hypjax.models.parts import Part

# Mesh axes. Parameters are replicated along the first and sharded along the second; images are
# sharded over both.
AXES = ("copies", "parts")


def create_mesh(
    shape: tuple[int, int] = (-1, 1),
    devices: Sequence[jax.Device] | None = None,
    *,
    sharding: str = "replicate",
) -> Mesh:
    """Creates a mesh of shape (copies of the parameters, shards of each); −1 uses all devices.

    With the sharding "fsdp", one shard stands for as many as there are devices for each copy.
    """
    copies, shards = shape
    chosen = devices or sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    if sharding == "fsdp" and shards == 1:
        copies = max(copies, 1)
        shards = max(len(chosen) // copies, 1)
    copies = len(chosen) // shards if copies == -1 else copies
    needed, present = max(copies, 1) * shards, len(chosen)
    # Processes without a device of the mesh would wait forever.
    leaves_process_idle = not devices and jax.process_count() > 1 and needed < present
    if needed > present or leaves_process_idle:
        problem = f"config.run.mesh is {shape}, {needed} devices, but there are {present}"
        raise UserError(f"{problem}; let copies times shards be {present}")
    return Mesh(np.array(chosen[:needed]).reshape(copies, shards), AXES)


@dataclasses.dataclass(frozen=True)
class Slices:
    """How a batch is split into slices (microbatches), which are sharded over devices."""

    count: int  # Number of slices, which are computed one after the other.
    rows: int  # Rows of the batch, with padding.


def num_parts(mesh: Mesh) -> int:
    """Number of parts into which a mesh cuts parameters."""
    return mesh.shape[AXES[1]]


def slices(batch_size: int, mesh: Mesh, microbatch: int = 0) -> Slices:
    """Splits a batch into equal slices with little padding; a microbatch of 0 makes one slice."""
    count = math.ceil(batch_size / microbatch) if microbatch else 1
    multiple = count * mesh.size
    return Slices(count, multiple * math.ceil(batch_size / multiple))


def local_rows(mesh: Mesh, num_rows: int) -> range:
    """The rows that this process's devices hold of a sharded array with `num_rows` rows."""
    indices: Any = sharded(mesh).addressable_devices_indices_map((num_rows,)).values()
    rows = [range(num_rows)[row_slice] for (row_slice,) in indices]
    return range(min(x.start for x in rows), max(x.stop for x in rows))


def compiler_options(mesh: Mesh) -> dict[str, bool | str]:
    """XLA options for jitting an encoder; an option in `XLA_FLAGS` takes precedence."""
    if mesh.devices.flat[0].platform == "cpu" and num_parts(mesh) > 1:
        # By default, XLA lets a CPU start early what may run at the same time, such as gathers. JAX
        # 0.8 has no such option.
        if jax.__version_info__ < (0, 9, 1):
            return {}
        return {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}
    # On an H200, a step of ViT-S/16 with 900 images takes 86.0 ms with cuBLAS and 95.7 ms with
    # XLA's Triton products (embedding: 27.9 and 29.3 ms); compiling takes 26 s and 35 s. Without
    # tuning, as for a GPU that is absent, Triton's tiles do not even fit every product.
    option = "xla_gpu_enable_triton_gemm"
    if not cuda_capability(mesh.devices.flat[0]) or option in os.environ.get("XLA_FLAGS", ""):
        return {}
    return {option: False}


def shard(mesh: Mesh, rows: PyTree) -> PyTree:
    """Shards arrays with a row per image over all devices; `rows` are this process's rows."""
    shard_rows = functools.partial(jax.make_array_from_process_local_data, sharded(mesh))
    return jax.tree.map(lambda x: shard_rows(np.asarray(x)), rows)


def place(tree: PyTree, sharding: NamedSharding | PyTree) -> PyTree:
    """Moves arrays, equal in all processes, to a sharding or a tree of shardings."""
    if isinstance(sharding, NamedSharding):
        sharding = jax.tree.map(lambda _: sharding, tree)

    def place_leaf(x: Any, sharding: NamedSharding) -> jax.Array:
        is_global = isinstance(x, jax.Array) and not x.is_fully_addressable
        if is_global or sharding.is_fully_addressable:
            return jax.device_put(x, sharding)
        x = np.asarray(x)  # `device_put` would compare all processes' copies.
        return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

    return jax.tree.map(place_leaf, tree, sharding)


def replicated(mesh: Mesh) -> NamedSharding:
    """The sharding of an array that every device holds in full."""
    return NamedSharding(mesh, P())


def sharded(mesh: Mesh) -> NamedSharding:
    """The sharding of an array whose rows (images) are split over all devices."""
    return NamedSharding(mesh, P(AXES))


def parameter_shardings(mesh: Mesh, tree: PyTree) -> PyTree:
    """Shardings that split each array along its longest axis that the number of shards divides."""
    num_shards = mesh.shape[AXES[1]]

    def sharding(x: Any) -> NamedSharding:
        divisible_sizes = [size if size % num_shards == 0 else 0 for size in x.shape]
        if num_shards == 1 or not any(divisible_sizes):
            return replicated(mesh)
        return NamedSharding(mesh, P(*[None] * int(np.argmax(divisible_sizes)), AXES[1]))

    return jax.tree.map(sharding, tree)


def gather(tree: PyTree) -> PyTree:
    """Gathers sharded arrays on this process's first device; all processes call it together."""

    def gather_leaf(x: Any) -> Any:
        if not isinstance(getattr(x, "sharding", None), NamedSharding):
            return x
        return jax.device_put(x, replicated(x.sharding.mesh)).addressable_data(0)

    return jax.tree.map(gather_leaf, tree)


def map_images(
    function: Callable[..., PyTree], mesh: Mesh, num_slices: int = 1, *, in_parts: bool = False
) -> Callable[..., PyTree]:
    """Splits a function of parameters and images over the devices, and replicates its result.

    Each row of the result may depend only on the parameters and its image. With several slices, the
    gradient recomputes intermediate values. If `in_parts`, the function gets each cut parameter as
    a `Part`, to be gathered. Use the returned function inside `jax.jit`.
    """

    def in_slices(params: PyTree, *images: PyTree) -> PyTree:
        if num_slices == 1:
            return function(params, *images)
        slices = jax.tree.map(lambda x: x.reshape(num_slices, -1, *x.shape[1:]), images)
        rematerialised = jax.checkpoint(lambda images: function(params, *images), prevent_cse=False)
        outputs = jax.lax.map(rematerialised, slices)
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), outputs)

    mapped = map_local_images(in_slices, mesh, in_parts=in_parts)
    return lambda *args: jax.lax.with_sharding_constraint(mapped(*args), replicated(mesh))


def map_local_images(
    function: Callable[..., PyTree], mesh: Mesh, *, in_parts: bool = False
) -> Callable[..., PyTree]:
    """Splits a function over the devices like `map_images`, but leaves its result sharded."""

    def mapped(params: PyTree, *images: PyTree) -> PyTree:
        of_params: PyTree = P()
        if in_parts:
            of_params = jax.tree.map(lambda x: x.spec, parameter_shardings(mesh, params))
        inputs, outputs = (of_params, *(P(AXES) for _ in images)), P(AXES)

        def local(params: PyTree, *images: PyTree) -> PyTree:
            return function(_as_parts(params, of_params) if in_parts else params, *images)

        # With check_vma, the bfloat16 gradients of the parameters would be summed over the devices
        # before they are cast back to float32.
        split = functools.partial(jax.shard_map, mesh=mesh, check_vma=False)
        return split(local, in_specs=inputs, out_specs=outputs)(params, *images)

    return mapped


def _as_parts(params: PyTree, specs: PyTree) -> PyTree:
    """Wraps the local parts of parameters with these specs."""

    def wrap(x: Any, spec: P) -> Any:
        return Part(x, spec.index(AXES[1]), AXES[1]) if AXES[1] in spec else x

    return jax.tree.map(wrap, params, specs)
