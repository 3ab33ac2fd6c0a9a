"""Where a gallery lies, and how it is searched part by part: on the host or on devices."""

import functools
from collections.abc import Iterator
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from hypjax.errors import UserError
from hypjax.geometry import Space
from hypjax.retrieval import inputs

AXIS = "gallery"  # Of the mesh of devices that share a gallery.


class Chunk(NamedTuple):
    """Some rows of a gallery on each device.

    Attributes:
        vectors: What is multiplied with the queries' vectors.
        offset: To subtract from the products; infinite where a row is no item.
        first: The item that is each device's first row.
    """

    vectors: Float[Array, "devices*r k"]
    offset: Float[Array, " devices*r"]
    first: Int[Array, " devices"]


class Gallery(Protocol):
    """Points to search.

    Attributes:
        mesh: The devices that search them.
        rows: Of the gallery, on the device that has most of them.
    """

    mesh: Mesh
    rows: int

    def chunks(self, space: Space, rows: int) -> Iterator[Chunk]:
        """Yields parts that together are the whole, in each device's order.

        Args:
            space: What the points are checked against.
            rows: Of each device's part.

        Raises:
            UserError: A point does not belong to the space.
        """

    def points(self, ids: Int[Array, "b k"]) -> tuple[Float[Array, "m d"], Int[Array, "b k"]]:
        """Points on the devices, and the rows of them that are certain items."""


def place(gallery: Float[np.ndarray | Array, "m d"]) -> Gallery:
    """Takes a gallery where it lies."""
    return _OnDevices(gallery) if isinstance(gallery, jax.Array) else _OnHost(gallery)


class _OnHost:
    """A NumPy array, which may be memory-mapped; streamed to all local devices."""

    def __init__(self, gallery: Float[np.ndarray, "m d"]) -> None:
        devices = jax.local_devices()
        self.mesh = Mesh(devices, AXIS)
        self.rows = -(-len(gallery) // len(devices))
        self._gallery = gallery
        self._whole: Array | None = None

    def chunks(self, space: Space, rows: int) -> Iterator[Chunk]:
        step = rows * self.mesh.size
        starts = range(0, len(self._gallery), step)
        ahead = self._chunk(space, 0, rows)
        for start in starts[1:]:
            # The next part is on its way, and checked, before this one is searched.
            chunk, ahead = ahead, self._chunk(space, start, rows)
            yield chunk
        yield ahead

    def _chunk(self, space: Space, start: int, rows: int) -> Chunk:
        step = rows * self.mesh.size
        part = inputs.float32(self._gallery[start : start + step])
        space.check(part, first=start)
        points = jax.device_put(inputs.pad_rows(part, step), _by_rows(self.mesh))
        if len(part) == len(self._gallery):
            self._whole = points
        first = start + rows * np.arange(self.mesh.size)
        return _chunk(space, self.mesh, points, first, np.arange(step) < len(part))

    def points(self, ids: Int[Array, "b k"]) -> tuple[Float[Array, "m d"], Int[Array, "b k"]]:
        if self._whole is not None:
            return self._whole, ids
        rows = np.arange(ids.size, dtype=np.int32).reshape(ids.shape)
        return inputs.float32(self._gallery[np.asarray(ids).reshape(-1)]), rows


class _OnDevices:
    """A JAX array, searched by the devices that hold it, each its own rows."""

    def __init__(self, gallery: Float[Array, "m d"]) -> None:
        devices = sorted(gallery.sharding.device_set, key=lambda device: device.id)
        if gallery.sharding.is_fully_replicated:
            devices = devices[:1]
        if len(gallery) % len(devices):
            raise UserError(
                f"a gallery of {len(gallery)} points cannot be shared by {len(devices)} devices; "
                "pass it as a NumPy array"
            )
        self.mesh = Mesh(devices, AXIS)
        self.rows = len(gallery) // len(devices)
        self._gallery = jax.device_put(inputs.float32(gallery), _by_rows(self.mesh))

    def chunks(self, space: Space, rows: int) -> Iterator[Chunk]:
        space.check(self._gallery)
        for start in range(0, self.rows, rows):
            # The last part begins earlier, so that it is as long as the others.
            begin = max(min(start, self.rows - rows), 0)
            points = _rows_of_each(self.mesh, rows)(self._gallery, begin)
            items = begin + np.arange(rows)
            mine = (items >= start) & (items < self.rows)
            first = begin + self.rows * np.arange(self.mesh.size)
            yield _chunk(space, self.mesh, points, first, np.tile(mine, self.mesh.size))

    def points(self, ids: Int[Array, "b k"]) -> tuple[Float[Array, "m d"], Int[Array, "b k"]]:
        return self._gallery, ids


def _chunk(
    space: Space,
    mesh: Mesh,
    points: Float[Array, "devices*r d"],
    first: Int[np.ndarray, " devices"],
    items: np.ndarray,
) -> Chunk:
    terms = inputs.search_terms(space, points)
    offset = jnp.where(jax.device_put(items, _by_rows(mesh)), terms.offset, jnp.inf)
    return Chunk(terms.gallery, offset, jax.device_put(first.astype(np.int32), _by_rows(mesh)))


def _by_rows(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, P(AXIS))


@functools.cache
def _rows_of_each(mesh: Mesh, rows: int):
    """The function that takes the same rows of every device's part, padded if it has fewer."""

    def take(points: Float[Array, "r d"], begin: Int[Array, ""]) -> Float[Array, "rows d"]:
        if len(points) <= rows:
            return inputs.pad_rows(points, rows)
        return lax.dynamic_slice_in_dim(points, begin, rows)

    return jax.jit(jax.shard_map(take, mesh=mesh, in_specs=(P(AXIS), P()), out_specs=P(AXIS)))
