"""Galleries in host or device memory, as sequences of chunks to search."""

import functools
from collections.abc import Iterator
from typing import NamedTuple, Protocol

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from hypjax.errors import UserError
from hypjax.retrieval import inputs
from hypjax.retrieval.scores import Score

_SAMPLED_BLOCKS, _SAMPLED_ROWS = 16, 256  # Of a sample.
AXIS = "gallery"  # Mesh axis over which the rows of a gallery are distributed.


class Chunk(NamedTuple):
    """Some rows of a gallery on each device.

    Attributes:
        vectors: Gallery vectors of the scores; padding for rows that are not to be found.
        first: Gallery index of each device's first row.
    """

    vectors: tuple[Float[Array, "devices*r v"], ...]
    first: Int[Array, " devices"]


class Gallery(Protocol):
    """Points to search.

    Attributes:
        mesh: Devices that search the points.
        size: Number of points.
        rows: Largest number of points on one device.
    """

    mesh: Mesh
    size: int
    rows: int

    def sample(self) -> Float[np.ndarray, "s d"]:
        """Some points from all parts of the gallery."""

    def chunks(self, score: Score, rows: int) -> Iterator[Chunk]:
        """Yields chunks that together contain every point once, in order on each device.

        Args:
            score: How points are compared.
            rows: Rows of a chunk on each device.

        Raises:
            UserError: A point does not belong to the space.
        """

    def points(self, ids: Int[Array, "b k"]) -> tuple[Float[Array, "m d"], Int[Array, "b k"]]:
        """Looks up items of the gallery.

        Args:
            ids: Indices into the gallery.

        Returns:
            An array of points, and the rows of it that are the requested items.
        """


def as_gallery(gallery: Float[np.ndarray | Array, "m d"]) -> Gallery:
    """Wraps a gallery without moving it between host and devices.

    Raises:
        UserError: The devices that hold a JAX array cannot share it evenly.
    """
    return _DeviceGallery(gallery) if isinstance(gallery, jax.Array) else _HostGallery(gallery)


class _HostGallery:
    """A NumPy array, possibly memory-mapped, that is streamed to all local devices."""

    def __init__(self, gallery: Float[np.ndarray, "m d"]) -> None:
        devices = jax.local_devices()
        self.mesh = Mesh(devices, AXIS)
        self.size = len(gallery)
        self.rows = -(-len(gallery) // len(devices))
        self._gallery = gallery
        self._on_devices: Array | None = None

    def chunks(self, score: Score, rows: int) -> Iterator[Chunk]:
        step = rows * self.mesh.size
        starts = range(0, len(self._gallery), step)
        ahead = self._chunk(score, 0, rows)
        for start in starts[1:]:
            # The next chunk is checked and sent to the devices before this one is searched.
            chunk, ahead = ahead, self._chunk(score, start, rows)
            yield chunk
        yield ahead

    def _chunk(self, score: Score, start: int, rows: int) -> Chunk:
        step = rows * self.mesh.size
        part = inputs.float32(self._gallery[start : start + step])
        score.space.check(part, first=start)
        points = jax.device_put(inputs.pad_rows(part, step), _by_rows(self.mesh))
        if len(part) == len(self._gallery):
            self._on_devices = points
        first = start + rows * np.arange(self.mesh.size)
        return _chunk(score, self.mesh, points, first, np.arange(step) < len(part))

    def sample(self) -> Float[np.ndarray, "s d"]:
        return sample(self._gallery)

    def points(self, ids: Int[Array, "b k"]) -> tuple[Float[Array, "m d"], Int[Array, "b k"]]:
        if self._on_devices is not None:
            return self._on_devices, ids
        rows = np.arange(ids.size, dtype=np.int32).reshape(ids.shape)
        return inputs.float32(self._gallery[np.asarray(ids).reshape(-1)]), rows


class _DeviceGallery:
    """A JAX array; each device that holds it searches an equal share of its rows."""

    def __init__(self, gallery: Float[Array, "m d"]) -> None:
        devices = sorted(gallery.sharding.device_set, key=lambda device: device.id)
        if gallery.sharding.is_fully_replicated:
            devices = devices[:1]
        if len(gallery) % len(devices):
            raise UserError(
                f"a gallery of {len(gallery)} points cannot be split evenly over {len(devices)} "
                "devices; pass it as a NumPy array"
            )
        self.mesh = Mesh(devices, AXIS)
        self.size = len(gallery)
        self.rows = len(gallery) // len(devices)
        self._gallery = jax.device_put(inputs.float32(gallery), _by_rows(self.mesh))

    def chunks(self, score: Score, rows: int) -> Iterator[Chunk]:
        score.space.check(self._gallery)
        for start in range(0, self.rows, rows):
            # The last chunk starts earlier, so that it has as many rows as the others.
            begin = max(min(start, self.rows - rows), 0)
            points = _slice_each(self.mesh, rows)(self._gallery, begin)
            items = begin + np.arange(rows)
            valid = (items >= start) & (items < self.rows)
            first = begin + self.rows * np.arange(self.mesh.size)
            yield _chunk(score, self.mesh, points, first, np.tile(valid, self.mesh.size))

    def sample(self) -> Float[np.ndarray, "s d"]:
        return sample(self._gallery)

    def points(self, ids: Int[Array, "b k"]) -> tuple[Float[Array, "m d"], Int[Array, "b k"]]:
        return self._gallery, ids


def _chunk(
    score: Score,
    mesh: Mesh,
    points: Float[Array, "devices*r d"],
    first: Int[np.ndarray, " devices"],
    items: np.ndarray,
) -> Chunk:
    vectors = score.of(points, jax.device_put(items, _by_rows(mesh))).gallery
    return Chunk(vectors, jax.device_put(first.astype(np.int32), _by_rows(mesh)))


def sample(gallery: Float[np.ndarray | Array, "m d"]) -> Float[np.ndarray, "s d"]:
    """Some points from all parts of a gallery, as float32.

    They are blocks of consecutive rows, which a disk reads faster than single rows.
    """
    starts = np.linspace(0, max(len(gallery) - _SAMPLED_ROWS, 0), _SAMPLED_BLOCKS, dtype=int)
    blocks = [np.asarray(gallery[at : at + _SAMPLED_ROWS]) for at in np.unique(starts)]
    return np.concatenate(blocks).astype(np.float32)


def _by_rows(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, P(AXIS))


@functools.cache
def _slice_each(mesh: Mesh, rows: int):
    """Jitted function that slices the same rows from every device's share, padded if too short."""

    def slice_rows(points: Float[Array, "r d"], begin: Int[Array, ""]) -> Float[Array, "rows d"]:
        if len(points) <= rows:
            return inputs.pad_rows(points, rows)
        return lax.dynamic_slice_in_dim(points, begin, rows)

    return jax.jit(jax.shard_map(slice_rows, mesh=mesh, in_specs=(P(AXIS), P()), out_specs=P(AXIS)))
