"""Post-processing of searches: query expansion and re-ranking."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from hypjax.errors import UserError
from hypjax.geometry import Space
from hypjax.retrieval import inputs
from hypjax.retrieval.inputs import Nearest, OwnIds, Points
from hypjax.retrieval.neighbors import search
from hypjax.retrieval.reranking import Reranking, rerank

# Largest size, in float64, of a block's points, and of the Hessians that their means may need.
_BLOCK_BYTES = 64 * 2**20


@dataclasses.dataclass(frozen=True)
class Postprocessing:
    """How the results of a search are post-processed.

    Re-ranking follows expansion.

    Attributes:
        expansion: Number of gallery items that expand each query; 0 for no expansion.
        alpha: Exponent of the items' similarities, see `expand_queries`.
        reranking: Parameters of `reranking.rerank`; None for no re-ranking.
    """

    expansion: int = 0
    alpha: float = 0.0
    reranking: Reranking | None = None

    def apply(
        self, queries: Points, own_ids: OwnIds, gallery: Points, space: Space, *, depth: int = 1
    ) -> tuple[Points, Nearest | tuple[None, None]]:
        """Expands queries and re-ranks their results; arguments as for `search`.

        Returns the expanded queries, and distances and ids of at least `depth` re-ranked results;
        None without re-ranking.
        """
        options = {"space": space, "own_ids": own_ids}
        if k := self.expansion:
            queries = expand_queries(queries, gallery, k=k, alpha=self.alpha, **options)
        if self.reranking is None:
            return queries, (None, None)
        parameters = dataclasses.replace(self.reranking, depth=max(self.reranking.depth, depth))
        return queries, rerank(queries, gallery, parameters=parameters, **options)

    def search(
        self, queries: Points, own_ids: OwnIds, gallery: Points, *, k: int, space: Space
    ) -> Nearest:
        """Searches and post-processes; re-ranked results have the distances of `rerank`."""
        inputs.check_search(k, own_ids, len(queries), len(gallery))
        queries, (distances, ids) = self.apply(queries, own_ids, gallery, space, depth=k)
        if ids is None:
            return search(queries, own_ids, gallery, k=k, space=space)
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
    expanded, dim = np.empty(queries.shape, np.float32), queries.shape[1]
    for rows in inputs.blocks(len(queries), _BLOCK_BYTES // (8 * dim * max(k + 1, dim))):
        points = np.concatenate([queries[rows, None], gallery[ids[rows]]], axis=1)
        with jax.enable_x64(True):
            expanded[rows] = _means(space, points, distances[rows], alpha)
    return expanded


@jax.jit
def _means(
    space: Space, points: Float[Array, "b k+1 d"], distances: Float[Array, "b k"], alpha: float
) -> Float[Array, "b d"]:
    """Means, in float64, of each query, at [:, 0], and its neighbours."""
    weights = jnp.maximum(space.similarity(distances.astype(jnp.float64)), 0.0) ** alpha
    weights = jnp.pad(weights, [(0, 0), (1, 0)], constant_values=1)
    return space.mean(points.astype(jnp.float64), weights)
