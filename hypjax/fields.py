"""Declarations of configuration fields: a default, a type, and a rule for valid values."""

import dataclasses
import itertools
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Protocol, runtime_checkable


@dataclasses.dataclass(frozen=True)
class Rule:
    """A condition on the value of a field."""

    holds: Callable[[Any], bool]
    words: str  # The condition in words, which messages append to 'it must be'.


@runtime_checkable
class Values(Protocol):
    """Values of fields by name: a mapping, or a `ConfigDict`, which is no `Mapping`."""

    def keys(self) -> Iterable[str]: ...  # noqa: D102
    def __contains__(self, name: object, /) -> bool: ...
    def __getitem__(self, name: str, /) -> Any: ...


_LARGEST = sys.float_info.max
ANY = Rule(lambda value: True, "a value")
_TYPES = {
    int: Rule(lambda value: type(value) is int, "a whole number"),
    float: Rule(lambda x: type(x) in (int, float) and abs(x) <= _LARGEST, "a finite number"),
    str: Rule(lambda value: isinstance(value, str), "a string"),
    bool: Rule(lambda value: type(value) is bool, "True or False"),
    tuple: Rule(lambda value: isinstance(value, tuple), "a list"),
}


@dataclasses.dataclass(frozen=True)
class Field:
    """A field of a configuration."""

    default: Any  # A tuple if values are lists.
    rule: Rule = ANY  # A further condition on values of the right type.
    learnable: bool = False  # Whether `objective.learn` may name the field, a number above 0.
    kind: type | None = None  # Type of values or of a list's items; None: the default's type.
    optional: bool = False  # Whether None is valid.

    def requirement(self, value: Any) -> str:
        """Says in words which requirement an invalid value breaks; '' for a valid value."""
        if value is None and self.optional:
            return ""
        is_list = isinstance(self.default, tuple)
        example = next(iter(self.default), "") if is_list else self.default
        type_rule = _TYPES[self.kind or type(example)]
        rules = [type_rule, self.rule]
        if is_list:
            items = each(type_rule.holds, f"a list whose items are each {type_rule.words}")
            rules = [Rule(_TYPES[tuple].holds, items.words), items, self.rule]
        words = next((rule.words for rule in rules if not rule.holds(value)), "")
        return f"{words}, or None" if words and self.optional else words


def one_of(*choices: str) -> Rule:
    """Rule that a value is one of these strings."""
    return Rule(lambda value: value in choices, "one of " + ", ".join(choices))


def at_least(bound: float) -> Rule:
    """A number that is not below a bound."""
    return Rule(lambda value: value >= bound, f"at least {bound}")


def within(low: float, high: float) -> Rule:
    """A number between two bounds, inclusive."""
    return Rule(lambda value: low <= value <= high, f"between {low} and {high}")


def range_within(low: float, high: float) -> Rule:
    """Two ascending numbers between two bounds."""
    return Rule(
        lambda value: len(value) == 2 and low < value[0] <= value[1] <= high,
        f"two ascending numbers above {low} and up to {high}",
    )


def each(holds: Callable[[Any], bool], words: str, *, least: int = 0, most: int = 10**9) -> Rule:
    """A list of `least` to `most` items that all meet a condition."""
    return Rule(lambda value: least <= len(value) <= most and all(map(holds, value)), words)


def some_of(choices: Collection[str]) -> Rule:
    """A list of distinct strings among the given ones."""
    return Rule(
        lambda value: len(set(value)) == len(value) and set(value) <= set(choices),
        "any of " + ", ".join(choices) + ", each once",
    )


def is_ascending(value: Sequence[int]) -> bool:
    """Whether numbers are above 0 and strictly ascending."""
    return all(low < high for low, high in itertools.pairwise((0, *value)))


ABOVE_0 = Rule(lambda value: value > 0, "above 0")
