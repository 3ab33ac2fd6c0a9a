"""Metrics of graded relevance: rankings that should follow a hierarchy of labels.

An item's level for a query is the number of labels that the two share: of the class and of the
coarse classes above it. Positives share at least one. H-AP, NDCG and ASI are those of the released
evaluation of Ramzi et al., *Hierarchical Average Precision Training for Pertinent Image Retrieval*
(ECCV 2022), with one correction, see `h_ap`.

With thousands of positives, nearly every item is about as far away as one of them, and float32
could not tell which comes first. Products in float64 can; subtraction orders the few near-ties.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Float, Int, Shaped

from hypjax.errors import UserError, nearest
from hypjax.geometry import Space
from hypjax.retrieval import inputs, subtraction
from hypjax.retrieval.inputs import Points, Rows
from hypjax.retrieval.metrics import postprocessed, report_excluded
from hypjax.retrieval.own_images import OwnRows
from hypjax.retrieval.positives import chunk_bounds
from hypjax.retrieval.postprocessing import Postprocessing
from hypjax.retrieval.scores import DOUBLE, Factors, Score
from hypjax.retrieval.selection import StreamedGallery
from hypjax.system.machine import usable_cores

_BOUND_BYTES = 2**26  # Largest size of the bounds on separations of a block of queries.
_CHUNK_BYTES = 2**26  # Largest size of the points of a chunk of the gallery, in float64.
_KEPT_BYTES = 2**30  # Largest size of a gallery whose factors are kept between blocks.
_CROWD = 2**12  # Near-ties of a query among which copies of a point are measured once.


class Ranking(NamedTuple):
    """A query's positives in the order of their distance."""

    ranks: Int[np.ndarray, " p"]  # From 0, ascending.
    levels: Int[np.ndarray, " p"]  # From 1.
    counts: Int[np.ndarray, " l+1"]  # Items of each level from 0, the query's own image included.


def h_ap(ranking: Ranking) -> float:
    """Hierarchical average precision (Ramzi et al., ECCV 2022; α = 1 in the released code).

    The relevance of level l is l, divided by the number of items of exactly this level; the
    query's own image counts there, and nowhere else. A positive's H-rank sums, over itself and the
    positives before it, the lesser of their relevance and its own. The score is the sum of H-ranks
    over ranks, divided by the sum of relevances: 1 if relevance never rises along the ranking.

    Levels of equal relevance count once. The released code counts each of them twice.
    """
    relevance = np.arange(len(ranking.counts)) / np.maximum(ranking.counts, 1)
    lesser = np.minimum.outer(relevance[1:], relevance)
    # For each positive, how many of each level are at its rank or before.
    before = np.cumsum(ranking.levels == np.arange(1, len(ranking.counts))[:, None], axis=1)
    h_ranks = np.sum(before * lesser[:, ranking.levels], axis=0)
    return np.sum(h_ranks / (ranking.ranks + 1)) / np.sum(relevance[ranking.levels])


def ndcg(ranking: Ranking) -> float:
    """Normalised discounted cumulative gain (Järvelin & Kekäläinen, 2002) of the whole ranking.

    Level l has gain 2^l − 1, and the discount of rank r, from 1, is log2(1 + r).
    """
    gains = np.exp2(ranking.levels) - 1
    ideal = np.sum(np.sort(gains)[::-1] / np.log2(np.arange(2, len(gains) + 2)))
    return np.sum(gains / np.log2(ranking.ranks + 2)) / ideal


def asi(ranking: Ranking) -> float:
    """Average set intersection (Sun et al., *Dynamic Metric Learning*, CVPR 2021).

    Mean over n, from 1 to the number of positives, of the overlap of the first n items with the
    first n of an ideal ranking, divided by n. Items of one level are interchangeable.
    """
    levels = np.arange(1, len(ranking.counts))[:, None]
    top_levels = np.zeros(len(ranking.ranks), int)  # Of the first p items, for p positives.
    within = ranking.ranks < len(top_levels)
    top_levels[ranking.ranks[within]] = ranking.levels[within]
    orders = top_levels, np.sort(ranking.levels)[::-1]
    shared = np.minimum(*(np.cumsum(order == levels, axis=1) for order in orders))
    return np.mean(np.sum(shared, axis=0) / np.arange(1, len(top_levels) + 1))


GRADED: dict[str, Callable[[Ranking], float]] = {"h_ap": h_ap, "ndcg": ndcg, "asi": asi}


def graded_scores(
    queries: Float[ArrayLike, "n d"],
    levels: Sequence[Shaped[ArrayLike, " n"]],
    gallery: Float[ArrayLike, "m d"] | None = None,
    gallery_levels: Sequence[Shaped[ArrayLike, " m"]] | None = None,
    *,
    space: Space,
    metrics: Sequence[str] = tuple(GRADED),
    postprocessing: Postprocessing | None = None,
    own_rows: OwnRows = (),
) -> dict[str, Float[np.ndarray, " n"]]:
    """Scores of each query by levels of labels: h_ap, ndcg and asi.

    `levels` lists the labels of the queries at each level: their classes [n], then ever coarser
    ones [n]; `gallery_levels` those of the gallery. Levels need not nest: only the number of shared
    labels counts. Rankings are exact in the sense of `nearest_neighbors`. For points, labels,
    `own_rows` and other arguments see `query_scores`.

    Returns:
        {metric: scores [n], float64}. The score is NaN for queries without a positive, and a
        warning says how many there are.

    Raises:
        UserError: As by `query_scores`; or queries and gallery differ in the number of levels.
    """
    for name in metrics:
        if name not in GRADED:
            raise UserError(f"unknown graded metric {name!r}{nearest(name, GRADED)}")
    item_levels = levels if gallery is None else () if gallery_levels is None else gallery_levels
    if not 0 < len(levels) == len(item_levels):
        raise UserError("queries and gallery need labels at the same levels, at least one")
    columns = zip(levels, item_levels, strict=True)
    pairs = [inputs.labelled(queries, x, gallery, y) for x, y in columns]
    labels, item_labels = (np.stack([pair[side].labels for pair in pairs]) for side in (0, 1))
    first_queries, first_gallery = pairs[0]  # Points and ids are equal in all pairs.
    ids, count = first_queries.ids, len(first_queries.points)
    if any(map(len, own_rows)):
        if len(own_rows) != count:
            raise UserError(f"own_rows has {len(own_rows)} lists for {count} queries")
        ids = np.array([rows[0] if len(rows) else -1 for rows in own_rows])
    else:
        own_rows = [()] * count if ids is None else ids[:, None]
    items = first_gallery.points
    points, top = postprocessed(postprocessing, first_queries.points, ids, items, space)
    search = _Search(space, StreamedGallery(items), item_labels)
    top = [None] * count if top is None else top
    scores = np.array(list(search.scores(metrics, points, labels.T, own_rows, top)))
    if not (has_positives := ~np.isnan(scores[:, 0])).any():
        raise UserError("no query has a match in the gallery; check the labels")
    report_excluded(has_positives)
    return dict(zip(metrics, scores.T, strict=True))


@dataclasses.dataclass(frozen=True)
class _Search:
    """A gallery whose items have labels at several levels."""

    space: Space
    gallery: StreamedGallery
    labels: Int[np.ndarray, "l m"]

    def scores(
        self, metrics: Sequence[str], queries: Points, *columns: Sequence[Any]
    ) -> Iterator[list[float]]:
        """Yields the scores of each query; columns hold the last arguments of `_ranking`."""
        score, items = Score.around(self.space, self.gallery.sample, DOUBLE), len(self.gallery)
        inputs.check_in(self.space, self.gallery.array)
        fits = 8 * self.gallery.array.size <= _KEPT_BYTES
        chunks = list(self._chunks(score)) if fits else None
        size = int(np.clip(_BOUND_BYTES // (16 * items), 1, len(queries)))

        def of_query(*arguments: Any) -> list[float]:
            ranking = self._ranking(*arguments)
            return [GRADED[x](ranking) if len(ranking.ranks) else np.nan for x in metrics]

        with ThreadPoolExecutor(usable_cores()) as pool:
            for part in inputs.blocks(len(queries), size):
                block = inputs.host_rows(queries, part)
                self.space.check(block, first=part.start)
                factors = score.factors(inputs.pad_rows(block, size))
                bounds = np.empty((size, 2, items))
                for rows, of_items in self._chunks(score) if chunks is None else chunks:
                    with score.enabled():
                        of_chunk = np.asarray(chunk_bounds(self.space, factors, of_items))
                    bounds[..., rows] = of_chunk[..., : rows.stop - rows.start]
                yield from pool.map(of_query, block, bounds, *(x[part] for x in columns))

    def _chunks(self, score: Score) -> Iterator[tuple[slice, Factors]]:
        """Yields factors of the gallery's items; the last chunk is padded."""
        dim, count = self.gallery.array.shape[1], len(self.gallery)
        size = int(np.clip(_CHUNK_BYTES // (8 * dim), 1, count))
        for items in inputs.blocks(count, size):
            points = inputs.pad_rows(inputs.host_rows(self.gallery.array, items), size)
            factors = score.factors(points)._replace(query=())
            yield slice(items.start, min(items.stop, count)), factors

    def _ranking(
        self,
        query: Float[np.ndarray, " d"],
        bounds: Float[np.ndarray, "2 m"],
        labels: Int[np.ndarray, " l"],
        own_items: Sequence[int],
        top: Rows | None,
    ) -> Ranking:
        """Ranks positives by bounds on −separation, after any re-ranked first results."""
        lower, upper = -bounds[::-1]  # Of separations.
        levels = np.sum(self.labels == labels[:, None], axis=0, dtype=np.int8)
        counts = np.bincount(levels, minlength=len(labels) + 1)
        # Own images rank last and are not positives, so that they affect no score.
        own_items = np.asarray(own_items, int)
        levels[own_items], lower[own_items], upper[own_items] = 0, np.inf, np.inf
        order = np.argsort(lower)
        # An item's place is certain if its lower bound exceeds all upper bounds before it.
        tied = np.maximum.accumulate(upper[order])[:-1] >= lower[order[1:]]
        # The order of near-ties matters only where their levels differ.
        if (mixed := tied & (np.diff(levels[order]) != 0)).any():
            runs = np.concatenate([[0], np.cumsum(~tied)])
            positions = np.flatnonzero(np.isin(runs, runs[1:][mixed]))
            items = order[positions]
            separations = self._separations(query, items)
            order[positions] = items[np.lexsort((items, separations, runs[positions]))]
        if top is not None:
            first = top[~np.isin(top, own_items)]
            order = np.concatenate([first, order[~np.isin(order, first)]])
        ranks = np.flatnonzero(levels[order])
        return Ranking(ranks, levels[order[ranks]].astype(int), counts)

    def _separations(self, query: Float[np.ndarray, " d"], items: Rows) -> Float[np.ndarray, " r"]:
        if len(items) <= _CROWD:
            return subtraction.of_items(self.space, query, self.gallery, items)
        # A collapsed model maps all images to one point.
        points = self._point_numbers[items]
        _, first, inverse = np.unique(points, return_index=True, return_inverse=True)
        return subtraction.of_items(self.space, query, self.gallery, items[first])[inverse]

    @functools.cached_property
    def _point_numbers(self) -> Rows:
        """A number for each item, the same for items at the same point."""
        return subtraction.unique_rows(inputs.host_rows(self.gallery.array, np.s_[:]))[1]
