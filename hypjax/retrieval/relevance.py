"""Who is relevant to whom: the items that a query should find, and those that do not count."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from hypjax.errors import UserError
from hypjax.retrieval import inputs
from hypjax.retrieval.inputs import Labelled
from hypjax.types import Judgements

LEVELS = ("easy", "medium", "hard")
Items = Sequence[Int[np.ndarray, " items"]]  # Gallery indices for each query.


class Relevance(NamedTuple):
    """The gallery items that each query should find.

    Attributes:
        positives: Indices of the relevant items, for each query.
        ignored: Indices of those removed from the query's ranking before it is scored, such as
            junk, for each query; None removes nothing.
    """

    positives: Items
    ignored: Items | None = None

    def checked(self, queries: int, items: int) -> "Relevance":
        """The same with int64 arrays, and with `ignored` filled in; raises UserError if wrong."""
        ignored = [()] * queries if self.ignored is None else self.ignored
        lists = {"positives": self.positives, "ignored": ignored}
        found = {name: _checked(name, given, queries, items) for name, given in lists.items()}
        for i, pair in enumerate(zip(found["positives"], found["ignored"], strict=True)):
            if len(both := np.intersect1d(*pair)):
                raise UserError(f"item {both[0]} is both positive and ignored for query {i}")
        return Relevance(**found)


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


def by_labels(asked: Labelled, searched: Labelled) -> Relevance:
    """Items of a query's class are positive; the query itself, if it is an item, is ignored."""
    # Lists that are made when a query is scored: all of them may need more memory than the points.
    of_class = dict(enumerate(inputs.items_of_classes(searched.labels)))
    none = np.zeros(0, np.int64)

    def positives(i: int) -> Int[np.ndarray, " items"]:
        items = of_class.get(asked.labels[i], none)
        return items if asked.ids is None else items[items != asked.ids[i]]

    def ignored(i: int) -> Int[np.ndarray, " items"]:
        return none if asked.ids is None else asked.ids[i : i + 1]

    return Relevance(_Lists(positives, len(asked.labels)), _Lists(ignored, len(asked.labels)))


class _Lists(Sequence):
    """Lists of items that a function makes."""

    def __init__(self, function: Callable[[int], Int[np.ndarray, " items"]], length: int) -> None:
        self._function, self._length = function, length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, i: int) -> Int[np.ndarray, " items"]:
        return self._function(i)


def relevance_at(level: str, judgements: Judgements) -> Relevance:
    """What counts at a level of difficulty (Radenović et al., CVPR 2018, Section 3).

    At level easy, hard items are ignored; at level medium, both are positive; at level hard, easy
    items are ignored. Queries without a positive at a level have no score there.

    Raises:
        UserError: The level is none of `LEVELS`.
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
