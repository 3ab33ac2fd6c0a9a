"""Exact rank of each query's nearest match."""

from collections.abc import Sequence

import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Bool, Float, Int, Shaped

from hypjax.geometry import Space
from hypjax.retrieval import inputs, scores, subtraction
from hypjax.retrieval.galleries import sample
from hypjax.retrieval.scores import Precision, Score
from hypjax.retrieval.tiles import NO_MATCH, Labelled, RankBounds, bound_ranks


def match_ranks(
    queries: Float[ArrayLike, "n d"],
    query_labels: Shaped[ArrayLike, " n"],
    gallery: Float[ArrayLike, "m d"] | None = None,
    gallery_labels: Shaped[ArrayLike, " m"] | None = None,
    *,
    space: Space,
    ks: Sequence[int] | None = None,
    own_ids: Int[np.ndarray, " n"] | None = None,
) -> Int[np.ndarray, " n"]:
    """Rank of each query's nearest match: the nearest gallery item of the same class.

    The rank is the number of items that an exact search lists before it: those strictly nearer, and
    those equally far with a smaller index. It is exact in the sense of `nearest_neighbors`. All
    local devices share the work.

    Args:
        queries: Points of the space, [n, d].
        query_labels: Class numbers or names of the queries, [n].
        gallery: Points of the space to search, [m, d]. If None, the gallery is the queries, and
            each query is excluded from its own results.
        gallery_labels: Classes of the gallery, [m]; required if there is a gallery.
        space: Space that measures the distances.
        ks: Numbers of neighbours of interest. If given, a rank may differ from the true one, but is
            below the same ones of these numbers. That takes less time.
        own_ids: Gallery index to exclude for each query, [n], if there is a gallery that holds the
            queries, perhaps as other points.

    Returns:
        Ranks from 0, [n], int32; `NO_MATCH` for queries without a match.

    Raises:
        UserError: A point is not finite or not in the space, or shapes do not match.
    """
    exclude_self = gallery is None
    if exclude_self:
        gallery, gallery_labels, own_ids = queries, query_labels, np.arange(len(queries))
    query_labels, gallery_labels = inputs.check_labelled(
        queries, query_labels, gallery, gallery_labels
    )
    queries, gallery = inputs.check_points(queries, gallery)
    inputs.check_own_ids(own_ids, len(queries), len(gallery))
    asked = Labelled(queries, query_labels, own_ids)
    searched = Labelled(gallery, gallery_labels)
    score = Score.around(space, sample(gallery))
    bounds = bound_ranks(asked, None if exclude_self else searched, score)
    found = bounds.least.copy()
    rows = np.flatnonzero(_undecided(bounds, ks))
    effort = [len(queries), len(rows)]
    points = inputs.float32(np.asarray(queries[rows]))
    if not subtraction.is_cheapest([points]):
        left = []
        for crowd in scores.crowds([points]):
            score = Score.around(space, points[crowd], Precision.DOUBLE)
            bounds = bound_ranks(asked.part(rows[crowd]), searched, score)
            found[rows[crowd]] = bounds.least
            left.append(rows[crowd][_undecided(bounds, ks)])
        rows = np.sort(np.concatenate(left))
    effort.append(len(rows))
    if len(rows):
        found[rows] = subtraction.ranks(space, asked.part(rows), searched)
    scores.report("ranks", *effort)
    return found


def _undecided(bounds: RankBounds, ks: Sequence[int] | None) -> Bool[np.ndarray, " n"]:
    """Marks ranks that are not known, or of which it is not known below which K they are."""
    if ks is None:
        return bounds.least != bounds.most
    least, most = (np.searchsorted(np.sort(ks), rank, side="right") for rank in bounds)
    return least != most


__all__ = ["NO_MATCH", "match_ranks"]
