"""The nearest among candidates, which an approximate search or a scan has found."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Float64, Int, Shaped

from hypjax.errors import UserError
from hypjax.geometry import PoincareBall, Space, Sphere, arithmetic
from hypjax.retrieval import inputs

_MEASURED = 512  # Candidates whose distances are computed at once, in the cache of a core.
_SCANNED = 256  # Queries whose products with the centre are computed at once.
_SLACK = 1e-5  # Relative error of those products, in float32, that is allowed for.
_TIED = 1e-5  # Relative difference of distances up to which they are equal.


def separation_factors(points: Float[np.ndarray, "n d"], space: Space) -> Float64[np.ndarray, " n"]:
    """Factors by which ‖x − y‖² is multiplied, one of each point, for their separation.

    Args:
        points: Points of a ball or of the sphere, [n, d].
        space: Their space.

    Returns:
        1 / (1 − c‖x‖²) in a ball and 1 on the sphere, [n], float64.

    Raises:
        UserError: The space is another one.
    """
    if isinstance(space, Sphere):
        return np.ones(len(points))
    if not isinstance(space, PoincareBall):
        raise UserError(f"there is no approximate search in {space}; search the .npz file")
    return 1 / (1 - float(space.c) * np.einsum("nd,nd->n", points, points, dtype=np.float64))


def assured(hits: Bool[np.ndarray, "s k"], own: Bool[np.ndarray, "s k"]) -> float:
    """Lower bound of the share of neighbours that searches find, from a sample of queries.

    Args:
        hits: Whether a search finds each neighbour.
        own: Whether the neighbour is the query itself.

    Returns:
        The mean over the queries less two of its standard errors, at least 0; with the queries
        themselves or without, the less. It tends to hold for new queries, but is no strict bound:
        a sample does not show misses that are rare and come together.
    """
    others = ~own | own.all(axis=1, keepdims=True)  # All, where there is a single image.
    shares = hits.mean(axis=1), hits.mean(axis=1, where=others)
    bounds = [each.mean() - 2 * each.std() / len(each) ** 0.5 for each in shares]
    return max(0.0, float(min(bounds)))


def rank(
    queries: Float32[np.ndarray, "n d"],
    gallery: Float32[np.ndarray, "m d"],
    rows: Int[np.ndarray, " p"],
    items: Int[np.ndarray, " p"],
    *,
    k: int,
    space: Space,
) -> tuple[Float64[np.ndarray, "n k"], Int[np.ndarray, "n k"]]:
    """Ranks candidates by their separations, which are computed by subtraction.

    Args:
        queries: Points of a ball or of the sphere.
        gallery: Points of the same space, which may be memory-mapped.
        rows: Rows of the queries, one for each candidate.
        items: Indices of the candidates; one may be listed several times.
        k: Number of items to return for each query.
        space: The space.

    Returns:
        Separations and indices of the items, nearest first, ties in the order of the gallery. Where
        a query has fewer candidates, the separation is infinite and the index −1.
    """
    pairs = np.sort(rows * len(gallery) + items)
    pairs = pairs[np.diff(pairs, prepend=-1) > 0]
    rows, items = np.divmod(pairs, max(len(gallery), 1))
    own = separation_factors(queries, space)

    def measure(block: slice) -> Float64[np.ndarray, " b"]:
        found = gallery[items[block]].astype(np.float64)
        scales = separation_factors(found, space) * own[rows[block]]
        found -= queries[rows[block]]
        return scales * np.einsum("pd,pd->p", found, found)

    blocks = [slice(start, start + _MEASURED) for start in range(0, len(rows), _MEASURED)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        separations = np.concatenate([np.empty(0), *pool.map(measure, blocks)])
    order = np.lexsort((separations, rows))
    rows, items, separations = rows[order], items[order], separations[order]
    places = np.arange(len(rows)) - np.searchsorted(rows, rows)
    kept = places < k
    listed = np.full((len(queries), k), np.inf), np.full((len(queries), k), -1)
    for array, values in zip(listed, (separations, items), strict=True):
        array[rows[kept], places[kept]] = values[kept]
    return listed


def found_neighbours(
    exact: tuple[Float[np.ndarray, "n k"], Shaped[np.ndarray, "n k"]],
    found: tuple[Float[np.ndarray, "n m"], Shaped[np.ndarray, "n m"]],
) -> Bool[np.ndarray, "n k"]:
    """Marks the nearest neighbours that a search found.

    Where more than k items qualify, since several are as far as the k-th, any of these count.

    Args:
        exact: Distances or separations of the nearest neighbours, ascending, and the items.
        found: The same of the items that the search found, in any order, each listed once.

    Returns:
        Whether each neighbour, or an item as far as the last that takes its place, was found.
    """
    hits = (exact[1][:, :, None] == found[1][:, None]).any(axis=2)
    known = (found[1][:, :, None] == exact[1][:, None]).any(axis=2)
    last = exact[0][:, -1:]
    places = ~hits & (exact[0] >= last * (1 - _TIED))
    others = ~known & (found[0] <= last * (1 + _TIED))
    return hits | (places & (np.cumsum(places, axis=1) <= others.sum(axis=1, keepdims=True)))


class Centre:
    """The points nearest to the centre of a ball, for a scan of all of them.

    They are near to every point, and in many dimensions they are almost equally near, so that a
    graph needs many candidates to find the nearest of them. A matrix product compares them all.
    """

    def __init__(
        self, gallery: Float32[np.ndarray, "m d"], items: Int[np.ndarray, " s"], space: Space
    ) -> None:
        """Copies points.

        Args:
            gallery: Points of a ball or of the sphere.
            items: Indices of those to scan.
            space: The space.
        """
        points = gallery[items].astype(np.float64)
        scales = separation_factors(points, space)[:, None]
        squares = np.sum(points**2, axis=1, keepdims=True)
        vectors = scales * np.concatenate([points, np.ones_like(squares), squares], axis=1)
        # A product of NumPy would keep a core busy for a while after its end.
        self._vectors = jax.device_put(
            vectors.astype(np.float32), jax.local_devices(backend="cpu")[0]
        )
        self._items = items
        self._largest = (squares.max(initial=0), scales.max(initial=1))
        self._space = space

    def within(
        self, queries: Float32[np.ndarray, "n d"], separations: Float64[np.ndarray, " n"]
    ) -> tuple[Int[np.ndarray, " p"], Int[np.ndarray, " p"]]:
        """Finds the points within given separations of queries.

        Args:
            queries: Points of the space.
            separations: A separation for each.

        Returns:
            Rows of the queries and indices of the items. Points slightly farther away may be
            listed, too.
        """
        pairs = [(np.empty(0, int),) * 2, *self._scan(queries, separations)]
        rows, places = (np.concatenate(parts) for parts in zip(*pairs, strict=True))
        return rows, self._items[places]

    def _scan(
        self, queries: Float32[np.ndarray, "n d"], separations: Float64[np.ndarray, " n"]
    ) -> Iterator[tuple[Int[np.ndarray, " p"], Int[np.ndarray, " p"]]]:
        squares = np.sum(np.square(queries, dtype=np.float64), axis=1, keepdims=True)
        vectors = np.concatenate([-2 * queries, squares, np.ones_like(squares)], axis=1)
        square, scale = self._largest
        slack = _SLACK * scale * (squares[:, 0] + square)
        limits = separations / separation_factors(queries, self._space) + slack
        vectors, limits = vectors.astype(np.float32), limits.astype(np.float32)
        size = min(_SCANNED, 1 << (len(queries) - 1).bit_length())  # Few sizes to compile for.
        for start in range(0, len(queries), size):
            block = [inputs.pad_rows(x[start : start + size], size) for x in (vectors, limits)]
            near = np.asarray(_near(*block, self._vectors))[: len(queries) - start]
            rows, places = np.divmod(np.flatnonzero(near), max(len(self._items), 1))
            yield rows + start, places


@jax.jit
def _near(
    queries: Float32[Array, "q e"], limits: Float32[Array, " q"], vectors: Float32[Array, "s e"]
) -> Bool[Array, "q s"]:
    return arithmetic.inner_products(queries, vectors) <= limits[:, None]
