"""Who is relevant to whom: the items that a query should find, and those that do not count."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from hypjax.errors import UserError
from hypjax.retrieval.inputs import Labelled
from hypjax.types import Judgements

LEVELS = ("easy", "medium", "hard")
Items = Sequence[Int[np.ndarray, " items"]]  # Gallery indices for each query.
Lists = tuple[Int[np.ndarray, " items"], Int[np.ndarray, " items"]]  # Of one: positives, ignored.


class Relevance(NamedTuple):
    """The gallery items that each query should find.

    Attributes:
        positives: Indices of the relevant items, for each query.
        ignored: Indices of those removed from the query's ranking before it is scored, such as
            junk, for each query; None removes nothing.
    """

    positives: Items
    ignored: Items | None = None

    def checked(self, queries: int, items: int) -> list[Lists]:
        """The lists of each query as int64 arrays; raises UserError if one is wrong."""
        positives = _checked("positives", self.positives, queries, items)
        ignored = [()] * queries if self.ignored is None else self.ignored
        pairs = list(zip(positives, _checked("ignored", ignored, queries, items), strict=True))
        for i, pair in enumerate(pairs):
            if len(both := np.intersect1d(*pair)):
                raise UserError(f"item {both[0]} is both positive and ignored for query {i}")
        return pairs


def _checked(name: str, lists: Items, queries: int, items: int) -> list[Int[np.ndarray, " items"]]:
    if len(lists) != queries:
        raise UserError(f"{name} has {len(lists)} lists for {queries} queries")
    found = []
    for i, given in enumerate(lists):
        array = np.asarray(given)
        whole = array.ndim == 1 and (array.dtype.kind in "iu" or not array.size)
        inside = array[(array >= 0) & (array < items)] if whole else array[:0]
        if len(np.unique(inside)) < array.size or not whole:
            raise UserError(
                f"{name} of query {i} must be indices from 0 to {items - 1}, none twice"
            )
        found.append(array.astype(np.int64))
    return found


def by_labels(asked: Labelled, searched: Labelled) -> Iterator[Lists]:
    """Items of a query's class are positive; the query itself, if it is an item, is ignored."""
    # Lists are made when a query is scored: all of them may need more memory than the points.
    order = np.argsort(searched.labels, kind="stable")
    of_class = np.split(order, np.cumsum(np.bincount(searched.labels)))
    none = np.zeros(0, np.int64)
    for row, label in enumerate(asked.labels):
        items = of_class[label] if label < len(of_class) else none
        own = none if asked.ids is None else asked.ids[row : row + 1]
        yield items[~np.isin(items, own)], own


def relevance_at(level: str, judgements: Judgements) -> Relevance:
    """What counts at a level of difficulty (Radenović et al., CVPR 2018, Section 3).

    At level easy, hard items are ignored; at level medium, both are positive; at level hard, easy
    items are ignored. Queries without a positive at a level have no score there. Raises UserError
    if the level is none of `LEVELS`.
    """
    easy, hard, junk = judgements
    if level == "easy":
        return Relevance(easy, _joined(junk, hard))
    if level == "medium":
        return Relevance(_joined(easy, hard), junk)
    if level == "hard":
        return Relevance(hard, _joined(junk, easy))
    raise UserError(f"there is no level {level!r}; choose among {', '.join(LEVELS)}")


def _joined(first: Items, second: Items) -> Items:
    return [[*a, *b] for a, b in zip(first, second, strict=True)]
