"""Relevance in degrees: the protocol of Revisited Oxford and Paris."""

from typing import NamedTuple

from hypjax.errors import UserError
from hypjax.retrieval.relevance import Items, Relevance

LEVELS = ("easy", "medium", "hard")


class Judgements(NamedTuple):
    """How clearly gallery items show what each query shows (Radenović et al., CVPR 2018).

    Attributes:
        easy: Indices of the items that show it clearly, for each query.
        hard: Indices of the items that show it under difficult conditions.
        junk: Indices of the items that show hardly any of it, which never count.
    """

    easy: Items
    hard: Items
    junk: Items

    def relevance(self, level: str) -> Relevance:
        """What counts at a level of difficulty.

        At level easy, hard items are ignored; at level medium, both are positive; at level hard,
        easy items are ignored. Queries without a positive at a level have no score there.

        Args:
            level: One of `LEVELS`.

        Raises:
            UserError: There is no such level.
        """
        if level == "easy":
            return Relevance(self.easy, _joined(self.junk, self.hard))
        if level == "medium":
            return Relevance(_joined(self.easy, self.hard), self.junk)
        if level == "hard":
            return Relevance(self.hard, _joined(self.junk, self.easy))
        raise UserError(f"there is no level {level!r}; choose among {', '.join(LEVELS)}")


def _joined(first: Items, second: Items) -> Items:
    return [[*a, *b] for a, b in zip(first, second, strict=True)]
