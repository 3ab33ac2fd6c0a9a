"""Refined searches: of expanded queries, with re-ranked results, or both."""

import dataclasses

import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Float, Int

from hypjax.errors import UserError
from hypjax.geometry import Space
from hypjax.retrieval.expansion import expand_queries
from hypjax.retrieval.neighbors import check_number, search
from hypjax.retrieval.prefixes import Shortlist
from hypjax.retrieval.reranking import Reranking, rerank
from hypjax.retrieval.selection import StreamedGallery


@dataclasses.dataclass(frozen=True)
class Refinement:
    """How the results of a search are refined.

    With both, the re-ranked results are those of the expanded queries.

    Attributes:
        expansion: Number of gallery items by which queries are expanded; 0 for none.
        alpha: Exponent of their similarities, see `expansion.expand_queries`.
        reranking: How results are re-ranked, see `reranking.rerank`; None for not at all.
        shortlist: Which items are found at all, by a prefix of the points; None for any.
    """

    expansion: int = 0
    alpha: float = 0.0
    reranking: Reranking | None = None
    shortlist: Shortlist | None = None

    def __post_init__(self) -> None:
        """Raises a `UserError` for both: a re-ranking searches for neighbours of all items."""
        if self.reranking is not None and self.shortlist is not None:
            raise UserError(
                "re-ranking compares the neighbours of all items; leave out the shortlist"
            )

    def expanded(
        self,
        queries: Float[ArrayLike, "n d"],
        own_ids: Int[np.ndarray, " n"] | None,
        gallery: Float[ArrayLike, "m d"],
        space: Space,
    ) -> Float[ArrayLike, "n d"]:
        """The expanded queries; the arguments are those of `search`."""
        if not self.expansion:
            return queries
        k, alpha = self.expansion, self.alpha
        return expand_queries(queries, gallery, k=k, alpha=alpha, space=space, own_ids=own_ids)

    def first_results(
        self,
        queries: Float[ArrayLike, "n d"],
        own_ids: Int[np.ndarray, " n"] | None,
        gallery: Float[ArrayLike, "m d"],
        space: Space,
    ) -> Int[np.ndarray, "n depth"]:
        """The first results of expanded queries, re-ranked; arguments are those of `search`."""
        return rerank(queries, gallery, space=space, own_ids=own_ids, numbers=self.reranking)[1]

    def search(
        self,
        queries: Float[ArrayLike, "n d"],
        own_ids: Int[np.ndarray, " n"] | None,
        gallery: Float[ArrayLike, "m d"] | StreamedGallery,
        *,
        k: int,
        space: Space,
    ) -> tuple[Float[np.ndarray, "n k"], Int[np.ndarray, "n k"]]:
        """Like `neighbors.search`, but refined.

        Re-ranking takes at least k results, and their distances are those by which it sorts them.
        """
        array = gallery.array if isinstance(gallery, StreamedGallery) else gallery
        queries = self.expanded(queries, own_ids, array, space)
        if self.shortlist is not None:
            check_number(k, gallery, own_ids)
            return self.shortlist.search(queries, own_ids, array, k=k, space=space)
        if self.reranking is None:
            return search(queries, own_ids, gallery, k=k, space=space)
        check_number(k, gallery, own_ids)
        numbers = dataclasses.replace(self.reranking, depth=max(self.reranking.depth, k))
        found = rerank(queries, array, space=space, own_ids=own_ids, numbers=numbers)
        return tuple(array[:, :k] for array in found)
