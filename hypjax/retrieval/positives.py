"""Positives, the items that a query should find, and their exact ranks."""

import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from hypjax.errors import UserError
from hypjax.geometry import Space
from hypjax.retrieval import inputs, subtraction
from hypjax.retrieval.inputs import Labelled, Points, Rows
from hypjax.retrieval.own_images import OwnRows
from hypjax.retrieval.scores import Factors, Score, highest, lowest, widened
from hypjax.retrieval.selection import StreamedGallery
from hypjax.system.machine import usable_cores
from hypjax.types import GroundTruth

LEVELS = ("easy", "medium", "hard")
Items = Sequence[Int[np.ndarray, " items"]]  # Gallery indices for each query.
# A query's positives and ignored items.
Lists = tuple[Int[np.ndarray, " items"], Int[np.ndarray, " items"]]
_BLOCK_SIZE = 512  # Queries whose positives are ranked at once.
_BOUND_BYTES = 2**26  # Largest size of the bounds on separations of a block and a chunk.
_MOST_UNDECIDED = 2**14  # Most items of a query whose order may be left open by bounds.
_CHUNK_BYTES = 2**25  # Largest size of the points of a chunk of the gallery.


class Relevance(NamedTuple):
    """The gallery items that each query should find."""

    positives: Items
    ignored: Items | None = None  # Removed from a ranking before it is scored, such as junk.

    def checked(self, queries: int, items: int) -> list[Lists]:
        """The lists of each query as int64 arrays; raises UserError if one is wrong."""
        positives = _checked("positives", self.positives, queries, items)
        ignored = [()] * queries if self.ignored is None else self.ignored
        pairs = list(zip(positives, _checked("ignored", ignored, queries, items), strict=True))
        for i, pair in enumerate(pairs):
            if len(overlap := np.intersect1d(*pair)):
                raise UserError(f"item {overlap[0]} is both positive and ignored for query {i}")
        return pairs


def _checked(name: str, lists: Items, queries: int, items: int) -> list[Int[np.ndarray, " items"]]:
    if len(lists) != queries:
        raise UserError(f"{name} has {len(lists)} lists for {queries} queries")
    checked = []
    for i, items_of_query in enumerate(lists):
        array = np.asarray(items_of_query)
        whole = array.ndim == 1 and (array.dtype.kind in "iu" or not array.size)
        inside = array[(array >= 0) & (array < items)] if whole else array[:0]
        if len(np.unique(inside)) < array.size or not whole:
            raise UserError(f"{name} of query {i} must be indices below {items}, none twice")
        checked.append(array.astype(np.int64))
    return checked


def by_labels(
    asked: Labelled, searched: Labelled, own_rows: OwnRows | None = None
) -> Iterator[Lists]:
    """Yields the items of each query's class as positives, and its own items as ignored."""
    # One by one, since all lists may take more memory than the points.
    order = np.argsort(searched.labels, kind="stable")
    of_class = np.split(order, np.cumsum(np.bincount(searched.labels)))
    none = np.zeros(0, np.int64)
    for row, label in enumerate(asked.labels):
        items = of_class[label] if label < len(of_class) else none
        if own_rows is not None:
            ignored = np.array(own_rows[row], np.int64)
        else:
            ignored = none if asked.ids is None else asked.ids[row : row + 1]
        yield items[~np.isin(items, ignored)], ignored


def relevance_at(level: str, ground_truth: GroundTruth) -> Relevance:
    """Positives and ignored items at a level (Radenović et al., CVPR 2018, Section 3).

    At level easy, hard items are ignored; at level medium, both are positive; at level hard, easy
    items are ignored. Queries without a positive at a level have no score there. Raises UserError
    if the level is none of `LEVELS`.
    """
    easy, hard, junk = ground_truth
    levels = {
        "easy": ((easy,), (junk, hard)),
        "medium": ((easy, hard), (junk,)),
        "hard": ((hard,), (junk, easy)),
    }
    if level not in levels:
        raise UserError(f"there is no level {level!r}; choose among {', '.join(levels)}")
    joined = (map(itertools.chain, *lists) for lists in levels[level])
    return Relevance(*([[*items] for items in lists] for lists in joined))


def positive_ranks(
    queries: Points, gallery: Points, lists: Iterable[Lists], space: Space
) -> Iterator[Int[np.ndarray, " positives"]]:
    """Yields the ranks of each query's positives, ascending, from their lists.

    A rank is the number of items that an exact search lists before the positive: those strictly
    nearer, and those equally far with a smaller index, without ignored items. Positives are
    measured by subtraction. Bounds show on which side of each positive most items are; the others
    are measured, too. Raises UserError if a point is not finite or not in the space.
    """
    streamed, lists = StreamedGallery(gallery), iter(lists)
    score = Score.around(space, streamed.sample)
    inputs.check_in(space, gallery)
    size = min(_BLOCK_SIZE, len(queries))
    limit = min(_BOUND_BYTES // (8 * size), _CHUNK_BYTES // (4 * gallery.shape[1]), len(gallery))
    with ThreadPoolExecutor(usable_cores()) as pool:
        for part in inputs.blocks(len(queries), size):
            block = inputs.host_rows(queries, part)
            space.check(block, first=part.start)
            factors = score.factors(inputs.pad_rows(block, size))
            new = functools.partial(_Positives, space, streamed)
            positives = list(pool.map(new, block, itertools.islice(lists, len(block))))
            for items in inputs.split(np.arange(len(gallery)), limit):
                points = inputs.pad_rows(inputs.host_rows(gallery, items), max(limit, 1))
                bounds = np.asarray(chunk_bounds(space, factors, score.factors(points)))
                count = functools.partial(_Positives.count, items=items)
                list(pool.map(count, positives, bounds[..., : len(items)]))
            yield from pool.map(_Positives.ranks, positives)


@jax.jit
def chunk_bounds(space: Space, queries: Factors, items: Factors) -> Float[Array, "b 2 r"]:
    """Lower and upper bounds on −separation of queries and items."""
    least = widened(lowest(space, queries, items), -1)
    return jnp.stack([least, widened(highest(space, queries.query, items.gallery), 1)], axis=1)


class _Positives:
    """The positives of one query, and counts of the items before each of them."""

    # Bounds enclose an item's −separation. Above a positive's −separation, the item surely comes
    # before it; below, after it. Only separations order the others, such as duplicates.

    def __init__(
        self, space: Space, gallery: StreamedGallery, query: Float[np.ndarray, " d"], lists: Lists
    ) -> None:
        self._space, self._gallery, self._query = space, gallery, query
        self._ids, self._ignored = np.sort(lists[0]), lists[1]
        self._nearness = -self._measured(self._ids) if len(self._ids) else np.empty(0)
        # How many items come before exactly the i farthest positives, for each i.
        self._before = np.zeros(len(self._ids) + 1, int)
        self._undecided: list[Rows] = []

    def count(self, bounds: Float[np.ndarray, "2 r"], items: Rows) -> None:
        """Counts the items of a chunk that surely come before each positive."""
        if not len(self._ids) or self._crowded():
            return
        nearness = np.sort(self._nearness)
        reached = np.flatnonzero(bounds[1] >= nearness[0])  # Others come after all positives.
        reached = reached[~np.isin(items[reached], self._ignored)]
        least, most = bounds[:, reached]
        passed = np.searchsorted(nearness, least, side="left")  # Positives surely after an item.
        undecided = np.searchsorted(nearness, most, side="right") > passed
        self._before += np.bincount(passed[~undecided], minlength=len(self._before))
        self._undecided.append(items[reached[undecided]])

    def ranks(self) -> Int[np.ndarray, " p"]:
        """Ranks of the positives, ascending."""
        if not len(self._ids):
            return self._ids
        if self._crowded():
            rows = subtraction.of_gallery(self._space, self._query[None], self._gallery.array)
            separations = next(rows)[1]
            items = np.setdiff1d(np.arange(len(separations)), self._ignored)
            return np.sort(_positions(items, separations[items], self._ids))
        items = np.concatenate(self._undecided)
        # An item before the i farthest positives counts for each of them.
        before = np.cumsum(self._before[::-1])[::-1][1:]
        before = before[np.argsort(np.argsort(self._nearness))]
        return np.sort(before + _positions(items, self._measured(items), self._ids))

    def _measured(self, items: Rows) -> Float[np.ndarray, " r"]:
        return subtraction.of_items(self._space, self._query, self._gallery, items)

    def _crowded(self) -> bool:
        """Whether too many items are undecided to list them."""
        return sum(map(len, self._undecided)) > _MOST_UNDECIDED


def _positions(
    items: Rows, separations: Float[np.ndarray, " r"], wanted: Rows
) -> Int[np.ndarray, " p"]:
    """Positions of wanted items when ascending items are ordered by separation, then by index."""
    positions = np.empty(len(items), int)
    positions[np.argsort(separations, kind="stable")] = np.arange(len(items))
    return positions[np.searchsorted(items, wanted)]
