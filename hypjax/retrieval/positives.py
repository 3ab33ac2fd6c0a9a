"""Positives, the items that a query should find, and their exact ranks.

With many positives, nearly every item is about as far away as some positive, and products in
float32 could not tell which comes first. Products in float64 can, except for near-ties, which
subtraction orders.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Int8

from hypjax.errors import UserError
from hypjax.geometry import Space
from hypjax.retrieval import inputs, subtraction
from hypjax.retrieval.inputs import GalleryPoints, Ids, Points, Rows, SomeRows
from hypjax.retrieval.scores import DOUBLE, Factors, Score, highest, lowest, widened
from hypjax.retrieval.selection import StreamedGallery
from hypjax.system.machine import usable_cores
from hypjax.types import GroundTruth

LEVELS = ("easy", "medium", "hard")
Items = Sequence[Sequence[int] | Int[np.ndarray, " _"]]  # Gallery indices for each query.
_BOUND_BYTES = 2**27  # Largest size of the bounds on separations of a block of queries.
_CHUNK_BYTES = 2**26  # Largest size of the points of a chunk of the gallery, in float64.
_KEPT_BYTES = 2**30  # Largest size of a gallery whose factors are kept between blocks.
_CROWD_SIZE = 2**12  # Near-ties of a query among which copies of a point are measured once.


class ItemRelevance(NamedTuple):
    """Relevance of all gallery items for one query."""

    levels: Int8[np.ndarray, " m"]  # From 1 for positives, 0 for other items.
    ignored: Sequence[int] | Rows  # Items that are removed from the ranking.


class Relevance(NamedTuple):
    """The gallery items that each query should find."""

    positives: Items
    ignored: Items | None = None  # Removed from a ranking before it is scored, such as junk.

    def of_items(self, num_queries: int, num_items: int) -> Iterator[ItemRelevance]:
        """Iterates over the queries; raises UserError before the first one if a list is wrong."""
        positives = _checked("positives", self.positives, num_queries, num_items)
        ignored = [()] * num_queries if self.ignored is None else self.ignored
        ignored = _checked("ignored", ignored, num_queries, num_items)
        for query, lists in enumerate(zip(positives, ignored, strict=True)):
            if len(overlap := np.intersect1d(*lists)):
                raise UserError(f"item {overlap[0]} is both positive and ignored for query {query}")

        def relevance(positives: Rows, ignored: SomeRows) -> ItemRelevance:
            levels = np.zeros(num_items, np.int8)
            levels[positives] = 1
            return ItemRelevance(levels, ignored)

        return map(relevance, positives, ignored)


def _checked(name: str, lists: Items, num_queries: int, num_items: int) -> list[Rows]:
    """Checks the items of each query, and converts them to int64."""
    if len(lists) != num_queries:
        raise UserError(f"{name} has {len(lists)} lists for {num_queries} queries")
    checked = []
    for row, items in enumerate(map(np.asarray, lists)):
        is_list = items.ndim == 1 and inputs.are_indices(items, num_items)
        if not is_list or len(np.unique(items)) < len(items):
            raise UserError(f"{name} of query {row} must be indices below {num_items}, none twice")
        checked.append(items.astype(np.int64))
    return checked


def relevance_at(level: str, ground_truth: GroundTruth) -> Relevance:
    """Positives and ignored items at a level of `LEVELS` (Radenović et al., CVPR 2018, Section 3).

    Level easy ignores hard items, level hard ignores easy items, and both are positives at level
    medium. Junk is always ignored. Queries without a positive at a level have no score there.
    Raises UserError for another level.
    """
    easy, hard, junk = ground_truth
    levels = {
        "easy": ((easy,), (junk, hard)),
        "medium": ((easy, hard), (junk,)),
        "hard": ((hard,), (junk, easy)),
    }
    if level not in levels:
        raise UserError(f"there is no level {level!r}; choose among {', '.join(levels)}")
    positives, ignored = (
        [np.array([*itertools.chain(*lists)], int) for lists in zip(*kinds, strict=True)]
        for kinds in levels[level]
    )
    return Relevance(positives, ignored)


class Ranking(NamedTuple):
    """A query's positives in the order of their distance."""

    ranks: Int[np.ndarray, " p"]  # From 0, ascending.
    levels: Int[np.ndarray, " p"]  # From 1.
    counts: Int[np.ndarray, " l+1"]  # All items of each level from 0, ignored ones included.


def rankings(
    queries: Points,
    gallery: GalleryPoints,
    relevances: Iterable[ItemRelevance],
    space: Space,
    reranked: Ids | None = None,
) -> Iterator[Ranking]:
    """Yields each query's positives in the order of their distance.

    A rank is the number of items that an exact search lists before the positive: those strictly
    nearer, and those equally far with a smaller index, without ignored items. `reranked` lists
    items of each query that come first, before all others, as after re-ranking. Raises UserError if
    a point is not finite or not in the space.
    """
    streamed = StreamedGallery(gallery)
    is_small = 8 * gallery.size <= _KEPT_BYTES
    ranker = _Ranker(space, streamed, is_small)
    score = Score.around(space, streamed.centre, DOUBLE)
    relevances = iter(relevances)
    kept_chunks = list(_chunks(gallery, score)) if is_small else None
    size = int(np.clip(_BOUND_BYTES // (16 * len(gallery)), 1, len(queries)))
    bounds = np.empty((size, 2, len(gallery)))  # Reused, because touching new memory is slow.
    with ThreadPoolExecutor(usable_cores()) as pool:
        for rows in inputs.blocks(len(queries), size):
            block = inputs.host_rows(queries, rows)
            space.check(block, first=rows.start)
            factors = score.factors(inputs.pad_rows(block, size), role="query")
            for items, item_factors in kept_chunks or _chunks(gallery, score):
                with score.enabled():
                    chunk = np.asarray(chunk_bounds(space, factors, item_factors))
                bounds[..., items] = chunk[..., : items.stop - items.start]
            block_relevances = itertools.islice(relevances, len(block))
            block_reranked = [None] * len(block) if reranked is None else reranked[rows]
            arguments = block, bounds[: len(block)], block_relevances, block_reranked
            yield from pool.map(ranker.rank, *arguments)


def _chunks(gallery: Points, score: Score) -> Iterator[tuple[slice, Factors]]:
    """Checks the gallery's points and yields their factors; pads the last chunk."""
    size = int(np.clip(_CHUNK_BYTES // (8 * gallery.shape[1]), 1, len(gallery)))
    for items in inputs.blocks(len(gallery), size):
        points = inputs.host_rows(gallery, items)
        score.space.check(points, first=items.start)
        factors = score.factors(inputs.pad_rows(points, size), role="gallery")
        yield slice(items.start, items.start + len(points)), factors


@jax.jit
def chunk_bounds(space: Space, queries: Factors, items: Factors) -> Float[Array, "b 2 r"]:
    """Lower and upper bounds on −separation of queries and items."""
    lower = widened(lowest(space, queries, items), -1)
    upper = widened(highest(space, queries.query, items.gallery), 1)
    return jnp.stack([lower, upper], axis=1)


@dataclasses.dataclass(frozen=True)
class _Ranker:
    """Ranks the positives of single queries in a gallery."""

    space: Space
    gallery: StreamedGallery
    is_small: bool  # Whether the gallery's points and their factors fit into memory.

    def rank(
        self,
        query: Float[np.ndarray, " d"],
        bounds: Float[np.ndarray, "2 m"],
        relevance: ItemRelevance,
        reranked: Rows | None,
    ) -> Ranking:
        """Ranks positives by bounds on −separation; re-ranked items, if any, come first."""
        levels, ignored = relevance.levels, np.asarray(relevance.ignored, int)
        lower, upper = -bounds[::-1]  # Of separations.
        lower[ignored], upper[ignored] = np.inf, -np.inf
        # Items that surely come after all positives affect no rank.
        near = np.flatnonzero(lower <= np.max(upper[levels > 0], initial=-np.inf))
        order = near[np.argsort(lower[near])]
        # An item's place is certain if its lower bound exceeds all upper bounds before it.
        tied = np.maximum.accumulate(upper[order])[:-1] >= lower[order[1:]]
        # The order of near-ties matters only where their levels differ.
        if (mixed := tied & (np.diff(levels[order]) != 0)).any():
            runs = np.concatenate([[0], np.cumsum(~tied)])  # A number for each run of near-ties.
            positions = np.flatnonzero(np.isin(runs, runs[1:][mixed]))
            items = order[positions]
            separations = self._separations(query, items)
            # Sorts within each run by separation, and equal separations by index.
            order[positions] = items[np.lexsort((items, separations, runs[positions]))]
        if reranked is not None:
            first = reranked[~np.isin(reranked, ignored)]
            order = np.concatenate([first, order[~np.isin(order, first)]])
        ranks = np.flatnonzero(levels[order])
        return Ranking(ranks, levels[order[ranks]].astype(int), np.bincount(levels))

    def _separations(self, query: Float[np.ndarray, " d"], items: Rows) -> Float[np.ndarray, " r"]:
        if len(items) <= _CROWD_SIZE or not self.is_small:
            return subtraction.item_separations(self.space, query, self.gallery, items)
        # A collapsed model maps all images to one point.
        points = self._point_numbers[items]
        _, distinct, inverse = np.unique(points, return_index=True, return_inverse=True)
        items = items[distinct]
        return subtraction.item_separations(self.space, query, self.gallery, items)[inverse]

    @functools.cached_property
    def _point_numbers(self) -> Rows:
        """A number for each item; items at the same point have the same number."""
        return subtraction.unique_rows(inputs.host_rows(self.gallery.array, np.s_[:]))[1]
