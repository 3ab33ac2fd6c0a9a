"""Searches with the first coordinates of embeddings, re-ranked by all of them.

Source: Kusupati et al., "Matryoshka Representation Learning" (NeurIPS 2022), Section 4.3.1. A model
that was trained with a loss of prefixes (`hypjax.objectives.Matryoshka`) suits them.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int

from hypjax.errors import UserError
from hypjax.geometry import Space
from hypjax.retrieval import inputs
from hypjax.retrieval.neighbors import nearest_among, search

_BLOCK = 1 << 14  # Rows that are cut at once.


def prefix_points(
    points: Float[ArrayLike, "n d"], dim: int, *, space: Space
) -> Float[np.ndarray, "n p"]:
    """Points of the first `dim` features of other points: embed(features(x)[:dim]).

    On the sphere, and in a ball that does not clip features, they are the points that a model has
    learned for the prefix. A ball knows features only as they were after clipping, which has
    shortened the prefix of a long feature with the rest of it: its prefix has the right direction,
    but is nearer to the origin than it was in training. Distances then differ, and ranks may.

    Args:
        points: Points of the space, [n, d].
        dim: Number of features, below that of the points.
        space: Their space.

    Returns:
        Points of the same space that have `dim` features, float32.

    Raises:
        UserError: A point is not in the space, or the number is not between 1 and their features.
    """
    points, _ = inputs.check_points(points, points)
    dim = inputs.check_whole_number("dim", dim)
    one = jax.ShapeDtypeStruct((1, points.shape[1]), jnp.float32)
    features = jax.eval_shape(space.features, one).shape[1]
    if not 1 <= dim < features:
        raise UserError(
            f"a prefix of {dim} dimensions must be shorter than the {features} features"
        )
    size = min(_BLOCK, 1 << (len(points) - 1).bit_length())  # Few sizes to compile for.
    found = []
    for rows in inputs.blocks(len(points), size):
        block = inputs.host_rows(points, rows)
        space.check(block, first=rows.start)
        padded = np.resize(block, (size, block.shape[1]))
        with jax.enable_x64(True):
            cut = np.asarray(_cut(space, padded, dim), np.float32)
        found.append(cut[: len(block)])
    return np.concatenate(found)


@functools.partial(jax.jit, static_argnames="dim")
def _cut(space: Space, points: Float[Array, "b d"], dim: int) -> Float[Array, "b p"]:
    return space.embed(space.features(points.astype(jnp.float64))[:, :dim])


@dataclasses.dataclass(frozen=True)
class Shortlist:
    """Candidates that are nearest to a query by a prefix.

    Attributes:
        dim: Number of features of the prefix.
        candidates: Number of items that are then ranked by all features.
    """

    dim: int
    candidates: int = 100

    def search(
        self,
        queries: Float[ArrayLike, "n d"],
        own_ids: Int[np.ndarray, " n"] | None,
        gallery: Float[ArrayLike, "m d"],
        *,
        k: int,
        space: Space,
    ) -> tuple[Float[np.ndarray, "n k"], Int[np.ndarray, "n k"]]:
        """Like `neighbors.search`, among the candidates; they are at least k.

        The prefixes of the gallery are computed each time. To keep them, and for approximate
        searches of them, use `prefix_points` and `neighbors.nearest_among`.
        """
        items = len(gallery) - (own_ids is not None)
        asked, searched = (prefix_points(x, self.dim, space=space) for x in (queries, gallery))
        listed = min(max(self.candidates, k), items)
        _, candidates = search(asked, own_ids, searched, k=listed, space=space)
        return nearest_among(queries, candidates, gallery, k=k, space=space)
