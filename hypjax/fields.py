"""Fields of configurations: a default, and a rule for the values. Objectives declare theirs."""

import dataclasses
import itertools
from collections.abc import Callable, Collection, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Rule:
    """A condition on the value of a field."""

    holds: Callable[[Any], bool]
    words: str  # The condition in words, to follow 'it must be'.


@dataclasses.dataclass(frozen=True)
class Field:
    """A field of a configuration; values have the default's type."""

    default: Any
    rule: Rule
    learnable: bool = False  # Whether `objective.learn` may name it: a number above 0.


def one_of(*choices: str) -> Rule:
    """One of some strings."""
    return Rule(lambda value: value in choices, "one of " + ", ".join(choices))


def at_least(bound: float) -> Rule:
    """A number from a bound on."""
    return Rule(lambda value: value >= bound, f"at least {bound}")


def within(low: float, high: float) -> Rule:
    """A number between two bounds, which are allowed."""
    return Rule(lambda value: low <= value <= high, f"between {low} and {high}")


def range_within(low: float, high: float) -> Rule:
    """Two ascending numbers between two bounds."""
    return Rule(
        lambda value: len(value) == 2 and low < value[0] <= value[1] <= high,
        f"two ascending numbers above {low} and up to {high}",
    )


def or_none(rule: Rule) -> Rule:
    """A rule that None meets, too."""
    return Rule(lambda value: value is None or rule.holds(value), f"{rule.words}, or None")


def each(holds: Callable[[Any], bool], words: str, *, least: int = 0, most: int = 10**9) -> Rule:
    """A list, perhaps of a bounded length, each of whose items meets a condition."""
    return Rule(lambda value: least <= len(value) <= most and all(map(holds, value)), words)


def some_of(choices: Collection[str]) -> Rule:
    """A list of strings, each once."""
    return Rule(
        lambda value: len(set(value)) == len(value) and set(value) <= set(choices),
        "any of " + ", ".join(choices) + ", each once",
    )


def is_ascending(value: Sequence[int]) -> bool:
    """Whether numbers are above 0 and ascend, each of them once."""
    return all(low < high for low, high in itertools.pairwise((0, *value)))


ABOVE_0 = Rule(lambda value: value > 0, "above 0")
TRUE_OR_FALSE = Rule(lambda value: isinstance(value, bool), "True or False")
