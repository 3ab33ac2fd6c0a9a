"""Post-processing of searches: query expansion, and k-reciprocal re-ranking.

Re-ranking follows Zhong et al., *Re-ranking Person Re-identification with k-reciprocal Encoding*
(CVPR 2017), whose equations are named, and is computed from lists of neighbours. Distances are used
as in the paper; the authors' code squares them and divides them by each item's largest distance.
The paper leaves open whether an item is in its own neighbourhoods. Here, as in the authors' code,
it is: in addition to its k1 nearest others, and as the first of the k2.
"""

import dataclasses
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from hypjax.errors import UserError
from hypjax.geometry import Space
from hypjax.retrieval import inputs
from hypjax.retrieval.inputs import GalleryPoints, Nearest, OwnIds, Points, Rows
from hypjax.retrieval.neighbors import search

if TYPE_CHECKING:
    from scipy.sparse import csr_array

# Largest size, in float64, of a block's points, and of the Hessians that their means may need.
_BLOCK_BYTES = 64 * 2**20
_PAIR_BYTES = 16 * 2**20  # Largest size, in float64, of pairs of points that are compared at once.
_ENTRIES = 2**22  # Approximate number of entries of encodings that are compared at once.


@dataclasses.dataclass(frozen=True)
class Reranking:
    """Parameters of the re-ranking, with the paper's defaults."""

    k1: int = 20  # Size of the neighbourhoods in which items must be reciprocal (Eq. 3).
    k2: int = 6  # Number of items whose encodings are averaged (Eq. 11); 1 for no average.
    weight: float = 0.3  # λ, the weight of the original distance (Eq. 12).
    depth: int = 100  # Number of results that are re-ranked.

    def __post_init__(self) -> None:
        least = min(self.k1, self.k2, self.depth)
        if least < 1 or self.k2 > self.k1 + 1 or not 0 <= self.weight <= 1:
            raise UserError(f"{self} needs 1 ≤ k1, k2 and depth, k2 ≤ k1 + 1, and 0 ≤ weight ≤ 1")


@dataclasses.dataclass(frozen=True)
class Postprocessing:
    """How the results of a search are post-processed: by expansion, then by re-ranking.

    Attributes:
        expansion: Number of gallery items that expand each query; 0 for no expansion.
        alpha: Exponent of the items' similarities, see `expand_queries`.
        reranking: Parameters of `rerank`; None for no re-ranking.
    """

    expansion: int = 0
    alpha: float = 0.0
    reranking: Reranking | None = None

    def apply(
        self,
        queries: Points,
        own_ids: OwnIds,
        gallery: GalleryPoints,
        space: Space,
        *,
        depth: int = 1,
    ) -> tuple[Points, Nearest | None]:
        """Expands queries and re-ranks their results; arguments as for `search`.

        Returns the expanded queries, and distances and ids of at least `depth` re-ranked results,
        or None without re-ranking.
        """
        if k := self.expansion:
            queries = expand_queries(
                queries, gallery, k=k, alpha=self.alpha, space=space, own_ids=own_ids
            )
        if self.reranking is None:
            return queries, None
        parameters = dataclasses.replace(self.reranking, depth=max(self.reranking.depth, depth))
        return queries, rerank(
            queries, gallery, space=space, own_ids=own_ids, parameters=parameters
        )

    def search(
        self, queries: Points, own_ids: OwnIds, gallery: GalleryPoints, *, k: int, space: Space
    ) -> Nearest:
        """Finds post-processed neighbours; re-ranked ones have the distances of `rerank`."""
        inputs.check_search(k, own_ids, len(queries), len(gallery))
        queries, nearest = self.apply(queries, own_ids, gallery, space, depth=k)
        if nearest is None:
            return search(queries, own_ids, gallery, k=k, space=space)
        distances, ids = nearest
        return distances[:, :k], ids[:, :k]


NO_POSTPROCESSING = Postprocessing()


def expand_queries(
    queries: Float[ArrayLike, "n d"],
    gallery: Float[ArrayLike, "m d"],
    *,
    k: int,
    alpha: float = 0.0,
    space: Space,
    own_ids: OwnIds = None,
) -> Float[np.ndarray, "n d"]:
    """Average (alpha = 0) and alpha-weighted query expansion.

    An expanded query is the `space.mean` of the query, with weight 1, and its k nearest gallery
    items, with weights max(similarity, 0)^alpha. The average follows Chum et al., *Total Recall*
    (ICCV 2007); the weights follow Radenović et al., *Fine-tuning CNN Image Retrieval with No Human
    Annotation* (TPAMI 2018). A query's own item, at `own_ids`, is not one of its neighbours. Takes
    the arguments and raises the errors of `rerank`; returns points, [n, d], float32.
    """
    queries, gallery = inputs.check_points(queries, gallery)
    if not alpha >= 0:
        raise UserError(f"alpha is {alpha}; it must be at least 0")
    distances, ids = search(queries, own_ids, gallery, k=k, space=space)
    expanded = np.empty(queries.shape, np.float32)
    dim = queries.shape[1]
    for rows in inputs.blocks(len(queries), _BLOCK_BYTES // (8 * dim * max(k + 1, dim))):
        points = np.concatenate([queries[rows, None], gallery[ids[rows]]], axis=1)
        with jax.enable_x64(True):
            expanded[rows] = _means(space, points, distances[rows], alpha)
    return expanded


@jax.jit
def _means(
    space: Space,
    points: Float[Array, "b _ d"],
    distances: Float[Array, "b k"],
    alpha: Float[Array, ""] | float,
) -> Float[Array, "b d"]:
    """Means, in float64, of each query, at [:, 0], and its neighbours."""
    weights = jnp.maximum(space.similarity(distances.astype(jnp.float64)), 0.0) ** alpha
    weights = jnp.pad(weights, [(0, 0), (1, 0)], constant_values=1)
    return space.mean(points.astype(jnp.float64), weights)


def rerank(
    queries: Float[ArrayLike, "n d"],
    gallery: Float[ArrayLike, "m d"],
    *,
    space: Space,
    own_ids: OwnIds = None,
    parameters: Reranking = Reranking(),
) -> Nearest:
    """Re-ranks the first results of each query by their k-reciprocal distances.

    Neighbourhoods come from the exact search, so memory grows with the number of items, not with
    its square. As in the paper:

    - R(p, k), Eq. 3: items that are among each other's k nearest;
    - R*(p, k1), Eq. 4: R(p, k1), and R(q, k1 // 2) for each member q if at least two thirds of
      R(q, k1 // 2) are in R(p, k1);
    - V_p, Eq. 7: exp(−d) for the members of R*(p, k1), 0 for others;
    - Eq. 11: the mean of the encodings V of the k2 nearest items;
    - Eq. 10: the Jaccard distance of these means;
    - Eq. 12: (1 − λ) times the Jaccard distance, plus λ times the original distance.

    `own_ids` holds the gallery index of each query, [n], −1 or None for none. A query's own item is
    not one of its results, but takes part in the neighbourhoods, and its encoding is the query's,
    also if the query was expanded. Returns the distances of Eq. 12,
    ascending, float32, and gallery indices, int32, [n, depth], or fewer if there are fewer items.
    Ties keep their order. Raises the errors of `nearest_neighbors`.
    """
    queries, gallery = inputs.check_points(queries, gallery)
    depth = min(parameters.depth, len(gallery) - (own_ids is not None))
    distances, ids = search(queries, own_ids, gallery, k=depth, space=space)
    query_ids = np.full(len(queries), -1) if own_ids is None else np.array(own_ids)
    outside = np.flatnonzero(query_ids < 0)  # These queries follow the gallery's items.
    query_ids[outside] = len(gallery) + np.arange(len(outside))
    items = np.concatenate([gallery, queries[outside]]) if len(outside) else np.asarray(gallery)
    compared = np.union1d(query_ids, ids)
    encodings = _Neighbourhoods(items, space, parameters).mean_encodings(compared)
    distances = parameters.weight * distances
    sums = encodings.sum(axis=1)
    entries_per_query = depth * (encodings.nnz // len(compared))
    for rows in inputs.blocks(len(queries), _ENTRIES // entries_per_query):
        pair_queries = np.repeat(query_ids[rows], depth)
        pair_items = ids[rows].reshape(-1)
        common = encodings[pair_queries].minimum(encodings[pair_items]).sum(axis=1)
        jaccard = 1 - common / (sums[pair_queries] + sums[pair_items] - common)  # Eq. 10.
        distances[rows] += (1 - parameters.weight) * jaccard.reshape(-1, depth)
    order = np.argsort(distances, axis=1, kind="stable")
    return np.take_along_axis(distances, order, axis=1), np.take_along_axis(ids, order, axis=1)


class _Neighbourhoods:
    """Neighbourhoods and encodings of items, as rows of sparse matrices, [items, items].

    In a matrix that a method returns, the rows of items that were not asked for are empty.
    """

    def __init__(self, points: Points, space: Space, parameters: Reranking) -> None:
        self._points, self._space = points, space
        self._k1 = min(parameters.k1, len(points) - 1)
        self._k2 = min(parameters.k2, len(points))
        self._lists = np.full((len(points), self._k1 + 1), -1, np.int32)

    def mean_encodings(self, items: Rows) -> "csr_array":
        """Averages the encodings V of each item's k2 nearest items (Eq. 11)."""
        nearest = self._nearest(items, self._k2)
        return nearest @ self._encodings(np.unique(nearest.indices)) / self._k2

    def _encodings(self, items: Rows) -> "csr_array":
        """V of each item: exp(−distance) at the members of its neighbourhood R* (Eq. 7)."""
        items, members = self._expanded(items).nonzero()
        entries = np.empty(len(items))
        size = max(_PAIR_BYTES // (16 * self._points.shape[1]), 1)
        for block in inputs.blocks(len(items), size):
            x, y = (inputs.pad_rows(self._points[i[block]], size) for i in (items, members))
            with jax.enable_x64(True):
                entries[block] = _kernel(self._space, x, y)[: len(entries[block])]
        return _sparse(entries, (items, members), len(self._points))

    def _expanded(self, items: Rows) -> "csr_array":
        """R*(p, k1) of each item p (Eq. 4)."""
        sets = self._reciprocal(items, self._k1)
        halves = self._reciprocal(np.unique(sets.indices), self._k1 // 2)
        # For each item and each member q of its set, how many items the set shares with q's half.
        common = (sets @ halves.T).multiply(sets).tocoo()
        is_accepted = 3 * common.data >= 2 * halves.sum(axis=1)[common.col]
        pairs = common.row[is_accepted], common.col[is_accepted]
        return sets + _sparse(np.ones(len(pairs[0]), np.int32), pairs, len(self._points)) @ halves

    def _reciprocal(self, items: Rows, k: int) -> "csr_array":
        """R(p, k) of each item p (Eq. 3)."""
        nearest = self._nearest(items, k + 1)
        return nearest.multiply(self._nearest(np.unique(nearest.indices), k + 1).T).tocsr()

    def _nearest(self, items: Rows, k: int) -> "csr_array":
        """The k nearest items of each item, which is its own first neighbour."""
        new = items[self._lists[items, 0] < 0]  # Their neighbours are not listed yet.
        if len(new):
            _, ids = search(self._points[new], new, self._points, k=self._k1, space=self._space)
            self._lists[new] = np.concatenate([new[:, None], ids], axis=1)
        columns = self._lists[items, :k].reshape(-1)
        pairs = np.repeat(items, k), columns
        return _sparse(np.ones(len(columns), np.int32), pairs, len(self._points))


def _sparse(values: np.ndarray, pairs: tuple[Rows, Rows], items: int) -> "csr_array":
    """A sparse matrix with values at pairs of rows and columns."""
    from scipy.sparse import csr_array  # Its import takes longer than most searches.

    return csr_array((values, pairs), shape=(items, items))


@jax.jit
def _kernel(space: Space, x: Float[Array, "b d"], y: Float[Array, "b d"]) -> Float[Array, " b"]:
    return jnp.exp(-space.distance(x.astype(jnp.float64), y.astype(jnp.float64)))
