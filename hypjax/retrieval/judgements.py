"""Relevance in degrees: the protocol of Revisited Oxford and Paris."""

from hypjax.errors import UserError
from hypjax.retrieval.relevance import Items, Relevance
from hypjax.types import Judgements

LEVELS = ("easy", "medium", "hard")


def relevance_at(level: str, judgements: Judgements) -> Relevance:
    """What counts at a level of difficulty (Radenović et al., CVPR 2018, Section 3).

    At level easy, hard items are ignored; at level medium, both are positive; at level hard, easy
    items are ignored. Queries without a positive at a level have no score there.

    Args:
        level: One of `LEVELS`.
        judgements: The judged items.

    Raises:
        UserError: There is no such level.
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
