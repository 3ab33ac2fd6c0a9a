"""Variants of a configuration, each with the settings that suit it best: choosing and comparing.

Settings are chosen by the score on validation classes, and the chosen ones are compared on the test
classes, with bootstrap intervals over runs and classes.
"""

import itertools
import pathlib
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int
from ml_collections import ConfigDict

from hypjax.config import default_workdir, load_config, read_config
from hypjax.errors import UserError
from hypjax.evaluate import score_queries
from hypjax.runs.files import RESULTS, read_results
from hypjax.runs.tables import selecting
from hypjax.runs.workdir import require_identity

_RESAMPLES = 4_000


class Candidate(NamedTuple):
    """A variant of a configuration file, with one choice of settings; a run for each seed."""

    file: str
    variant: str
    overrides: tuple[str, ...]  # Of all candidates.
    settings: tuple[str, ...]  # Further overrides, such as 'objective.temperature=0.1'.

    def __str__(self) -> str:
        """The settings, as a table shows them."""
        return " ".join(self.settings) or "as in the file"

    def _overrides(self, seed: str) -> tuple[str, ...]:
        return (*self.overrides, *self.settings, f"seed={seed}")

    def arguments(self, seed: str) -> str:
        """Arguments of `hypjax.main`, quoted for a shell."""
        fields = (f"--config.{field}" for field in self._overrides(seed))
        return shlex.join([f"--config={self.file}:{self.variant}", *fields])

    def load(self, seed: str) -> ConfigDict:
        """The run's configuration."""
        return load_config(f"{self.file}:{self.variant}", self._overrides(seed))

    def folder(self, seed: str) -> pathlib.Path:
        """The run's default folder."""
        unchanged = read_config(f"{self.file}:{self.variant}")
        return pathlib.Path(default_workdir(self.load(seed), unchanged))

    def results(self, seed: str) -> dict[str, Any] | None:
        """What results.json holds; None if the run is unfinished."""
        require_identity(folder := self.folder(seed), self.load(seed))
        return read_results(folder / RESULTS)


def candidates(file: str, overrides: Sequence[str], text: str) -> list[Candidate]:
    """All settings of a variant, from a text such as 'hyp objective.temperature=0.1,0.2'."""
    variant, *fields = text.split() or [""]
    values = []
    for field in fields:
        name, _, listed = field.partition("=")
        if not name or "" in listed.split(","):
            raise UserError(f"--variant={text!r}: {field!r} is not FIELD=VALUE,VALUE,...")
        values.append([f"{name}={value}" for value in listed.split(",")])
    overrides = tuple(overrides)
    return [Candidate(file, variant, overrides, each) for each in itertools.product(*values)]


def _validation_score(results: Mapping[str, Any]) -> tuple[str, float]:
    """The score by which settings are chosen: the head's first recall on validation classes."""
    held_out = results["validation"]
    scores = held_out.get("best", held_out["final"])["head"]
    name = selecting(scores)
    return name, scores[name]


def best(grid: Mapping[Candidate, Mapping[str, Any]]) -> Candidate:
    """The settings with the best score on validation classes; the first one of equals."""
    for candidate, results in grid.items():
        if not results.get("validation"):
            raise UserError(
                f"{candidate.variant} with {candidate} has no validation classes to choose by; set "
                "config.data.validation_classes"
            )
    return max(grid, key=lambda candidate: _validation_score(grid[candidate])[1])


def print_choice(
    tried: Mapping[Candidate, Mapping[str, Any]], chosen: Sequence[Candidate], seed: str
) -> None:
    """Prints the scores on validation classes, and which settings these choose."""
    width = max(len(candidate.variant) for candidate in tried)
    scores = {candidate: _validation_score(results) for candidate, results in tried.items()}
    name, _ = next(iter(scores.values()))
    print(f"{name} of the head on the validation classes, in percent, seed {seed}:")
    for candidate, (_, score) in scores.items():
        mark = "  chosen" if candidate in chosen else ""
        print(f"  {candidate.variant:<{width}}  {100 * score:5.1f}  {candidate}{mark}")


def print_comparison(chosen: Sequence[Candidate], seeds: Sequence[str]) -> None:
    """Prints scores on test classes, and their differences from the first, with intervals."""
    names, labels, methods = [], [], []
    for candidate in chosen:
        found = [score_queries(candidate.folder(seed)) for seed in seeds]
        scores, of_runs = zip(*found, strict=True)
        names.append(selecting(scores[0]))
        labels.append(of_runs[0])
        methods.append(Sums.of(np.stack([each[names[-1]] for each in scores]), labels[-1]))
    if len(set(names)) > 1 or not all(np.array_equal(labels[0], each) for each in labels):
        raise UserError("the variants differ in eval.ks or in their test images")
    means, differences = bootstrap(methods)
    print(
        f"{names[0]} of the head on the test classes, in percent: mean of seeds "
        f"{', '.join(seeds)}, 95% interval over seeds and classes, and difference from the first:"
    )
    width = max(len(candidate.variant) for candidate in chosen)
    for i, (candidate, mean, other) in enumerate(zip(chosen, means, differences, strict=True)):
        line = "  {:<{}}  {:5.1f}  [{:.1f}, {:.1f}]".format(
            candidate.variant, width, *(100 * each for each in mean)
        )
        if i:
            line += "  {:+5.1f}  [{:+.1f}, {:+.1f}]".format(*(100 * each for each in other))
        print(line)


class Sums(NamedTuple):
    """Scores of some runs of one method, summed by class."""

    totals: Float[np.ndarray, "runs classes"]
    counts: Int[np.ndarray, " classes"]  # Number of queries.

    @classmethod
    def of(
        cls, scores: Float[np.ndarray, "runs queries"], labels: Int[np.ndarray, " queries"]
    ) -> "Sums":
        """Sums scores by label; NaN marks queries without a match, which do not count."""
        valid = ~np.isnan(scores[0])
        _, numbers, counts = np.unique(labels[valid], return_inverse=True, return_counts=True)
        return cls(np.stack([np.bincount(numbers, run[valid]) for run in scores]), counts)


class Interval(NamedTuple):
    """A mean, and the 2.5th and the 97.5th percentile of the resampled means."""

    mean: float
    low: float
    high: float


def bootstrap(methods: Sequence[Sums]) -> tuple[list[Interval], list[Interval]]:
    """Mean score of each method, and its difference from that of the first.

    Queries of one class are alike, and so are those of one run. Classes and runs are therefore what
    is drawn with replacement: the same classes for all methods, since all are tested on the same
    images, but runs separately. Percentiles of 4,000 such draws bound an interval (Efron and
    Tibshirani, An Introduction to the Bootstrap, 1993, Section 13.3). Few runs give an interval
    that is too short.
    """
    generator = np.random.default_rng(0)
    counts = methods[0].counts

    def draw(count: int) -> Int[np.ndarray, "resamples count"]:
        return generator.multinomial(count, np.full(count, 1 / count), _RESAMPLES)

    classes = draw(len(counts))
    pairs = []
    for totals, _ in methods:
        of_runs = classes @ totals.T / (classes @ counts)[:, None]
        draws = np.mean(draw(len(totals)) * of_runs, axis=1)
        pairs.append((totals.sum() / (len(totals) * counts.sum()), draws))
    differences = [_interval(mean - pairs[0][0], draws - pairs[0][1]) for mean, draws in pairs]
    return [_interval(*pair) for pair in pairs], differences


def _interval(mean: float, draws: Float[np.ndarray, " resamples"]) -> Interval:
    return Interval(float(mean), *map(float, np.percentile(draws, [2.5, 97.5])))
