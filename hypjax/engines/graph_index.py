"""Graphs of usearch that compare points by their separation, with a compiled metric.

Graphs and lists for inner products assume vectors of similar length, which those of hyperbolic
points are not. So these graphs compare points by ‖x − y‖² / ((1 − c‖x‖²)(1 − c‖y‖²)), their
separation, of which the distance 2/√c·asinh(√(c·separation)) is an increasing function. A vector of
the graph holds the coordinates of a point and, last, 1 / (1 − c‖x‖²); on the sphere, it holds the
coordinates alone.

The time of a search is that of reading vectors from memory. So they are rounded to bfloat16, the
upper half of a float32, where that is fine enough to find the candidates of a search.
"""

import functools
import pathlib
from typing import Any

import numpy as np
from jaxtyping import Float32

from hypjax.engines.candidates import separation_factors
from hypjax.errors import UserError
from hypjax.geometry import PoincareBall, Space, Sphere

_SPARSE, _DENSE = (32, 256), (64, 512)  # Links of a point, and candidates when it is added.
_SHORT = 32  # Vectors of fewer coordinates fill few cache lines, so that rounding gains nothing.
_ROUNDING = 2**-9  # Typical relative error of a point in bfloat16.
_TOLERATED = 0.05  # Error of points, as a share of the distances between neighbours.
_MOST = 0.01  # Share of the points whose error may be larger.


def vectors(points: Float32[np.ndarray, "n d"], space: Space) -> Float32[np.ndarray, "n e"]:
    """Vectors of the graph for points of a ball or of the sphere."""
    if not isinstance(space, PoincareBall):
        return points
    factors = separation_factors(points, space)[:, None]
    return np.concatenate([points, factors], axis=1).astype(np.float32)


def can_round(points: Float32[np.ndarray, "n d"], neighbours: Float32[np.ndarray, "n d"]) -> bool:
    """Whether bfloat16 makes searches faster and is fine enough for a graph.

    Args:
        points: Some points of the gallery.
        neighbours: For each, its tenth neighbour, or another one that a search should find.

    Returns:
        Whether vectors are long, and the rounding errors of nearly all points are small beside the
        distances.
    """
    if points.shape[1] < _SHORT:
        return False
    lengths, distances = (np.linalg.norm(x, axis=1) for x in (points, points - neighbours))
    return bool(np.mean(_ROUNDING * lengths < _TOLERATED * distances) >= 1 - _MOST)


def create(space: Space, dim: int, *, rounded: bool) -> Any:
    """An empty graph for points of a space.

    Args:
        space: A ball or the sphere.
        dim: Number of coordinates.
        rounded: Whether vectors are rounded to bfloat16.

    Raises:
        UserError: usearch or numba is not installed, or the space is another one.
    """
    try:
        import usearch.index
    except ImportError as error:
        raise UserError('a .usearch gallery needs usearch: pip install "hypjax[ann]"') from error
    if isinstance(space, Sphere):
        metric, size = usearch.index.MetricKind.L2sq, dim
    elif isinstance(space, PoincareBall):
        metric, size = _separation(dim, rounded)[0], dim + 1
    else:
        raise UserError(f"there is no graph for {space}; search the .npz file")
    links, added = _DENSE if dim >= _SHORT else _SPARSE
    return usearch.index.Index(
        ndim=size,
        metric=metric,
        dtype="bf16" if rounded else "f32",
        connectivity=links,
        expansion_add=added,
    )


def read(index: Any, path: pathlib.Path, *, writable: bool) -> None:
    """Reads the file of a graph.

    Args:
        index: What `create` returned.
        path: The file.
        writable: Whether to read it into memory. Otherwise it is memory-mapped.

    Raises:
        UserError: The file is damaged, or a graph of other vectors.
    """
    metric, kind = index.metric, (index.ndim, index.dtype)
    try:
        (index.load if writable else index.view)(str(path))
    except Exception as error:  # usearch raises almost anything.
        raise UserError(f"{path} is damaged; export the gallery again") from error
    if (index.ndim, index.dtype) != kind:
        raise UserError(f"{path} is not the graph that its table describes; export it again")
    index.metric = metric  # The file holds none.


@functools.cache
def _separation(dim: int, rounded: bool) -> tuple[Any, Any]:
    """The separation of two vectors of the graph as a metric of usearch, and its function.

    usearch keeps the address of the function alone, so that the cache has to keep the function.
    """
    try:
        import numba
    except ImportError as error:
        raise UserError('a .usearch gallery needs numba: pip install "hypjax[ann]"') from error
    from usearch.index import CompiledMetric, MetricKind, MetricSignature

    @numba.njit(inline="always")
    def wide(value: Any) -> Any:
        """The float32 whose upper half is given."""
        return np.uint32(value << 16).view(np.float32) if rounded else value

    vector = numba.types.CPointer(numba.types.uint16 if rounded else numba.types.float32)

    @numba.cfunc(numba.types.float32(vector, vector), fastmath={"reassoc", "contract", "nsz"})
    def separation(x: Any, y: Any) -> Any:
        total = numba.types.float32(0)
        for i in range(dim):
            difference = wide(x[i]) - wide(y[i])
            total += difference * difference
        return total * wide(x[dim]) * wide(y[dim])

    metric = CompiledMetric(separation.address, MetricKind.Unknown, MetricSignature.ArrayArray)
    return metric, separation
