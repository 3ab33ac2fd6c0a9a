"""Compares variants of a configuration, each with settings chosen on validation images."""

import itertools
import pathlib
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int
from ml_collections import ConfigDict

from hypjax.config import default_workdir, differences, identity, load_config, read_config
from hypjax.errors import UserError
from hypjax.evaluate import score_queries
from hypjax.inference.run import Run
from hypjax.runs.tables import aligned, selection_metric
from hypjax.runs.workdir import Workdir

_RESAMPLES = 4_000
# Fields of `data` that must be equal in all runs: they choose the images that are scored.
_IMAGES = ("name", "path", "labels", "split", "split_seed", "test_classes", "validation_classes")

# Scores of one method's runs, summed by class, and the number of queries of each class.
Sums = tuple[Float[np.ndarray, "runs classes"], Int[np.ndarray, " classes"]]
Scores = Mapping["Candidate", tuple[str, float]]  # Name and value of the selection metric.


class Candidate(NamedTuple):
    """A variant of a configuration file with one choice of settings, trained once per seed."""

    file: str
    variant: str
    overrides: tuple[str, ...]  # The same for all candidates.
    settings: tuple[str, ...]  # Further overrides, such as 'objective.temperature=0.1'.

    def __str__(self) -> str:
        """The settings, for tables."""
        return " ".join(self.settings) or "as in the file"

    @property
    def spec(self) -> str:
        """The configuration's file and variant."""
        return f"{self.file}:{self.variant}"

    def _all_overrides(self, seed: str) -> list[str]:
        return [*self.overrides, *self.settings, f"seed={seed}"]

    def arguments(self, seed: str) -> str:
        """Arguments of `hypjax.main`, quoted for a shell."""
        fields = (f"--config.{field}" for field in self._all_overrides(seed))
        return shlex.join([f"--config={self.spec}", *fields])

    def config(self, seed: str) -> ConfigDict:
        """The run's configuration."""
        return load_config(self.spec, self._all_overrides(seed))

    def folder(self, seed: str) -> str:
        """The run's default folder."""
        return default_workdir(self.config(seed), read_config(self.spec))

    def run(self, seed: str) -> Workdir:
        """Opens the run's default folder; raises a `UserError` if it has another configuration."""
        return Workdir(pathlib.Path(self.folder(seed)), self.config(seed))

    def num_changes(self) -> int:
        """Number of fields in which the settings differ from the file."""
        return len(differences(identity(read_config(self.spec)), identity(self.config("0"))))


def candidates(file: str, overrides: Sequence[str], text: str) -> list[Candidate]:
    """All combinations of a variant's settings: 'hyp objective.temperature=0.1,0.2' has two."""
    variant, *fields = text.split() or [""]
    choices = []  # For each field, its overrides.
    for field in fields:
        name, _, values = field.partition("=")
        if not name or "" in values.split(","):
            raise UserError(f"--variant={text!r}: {field!r} is not FIELD=VALUE,VALUE,...")
        choices.append([f"{name}={value}" for value in values.split(",")])
    combinations = itertools.product(*choices)
    return [Candidate(file, variant, tuple(overrides), settings) for settings in combinations]


def require_comparable(candidates: Sequence[Candidate], seed: str, *, choosing: bool) -> None:
    """Raises a `UserError`, before training, if runs could not be compared by their scores.

    If `choosing` among settings, the runs also need validation images.
    """
    first, *others = [candidate.config(seed) for candidate in candidates]
    for field in ("eval.ks", *(f"data.{name}" for name in _IMAGES)):
        group, name = field.split(".")
        if any(config[group][name] != first[group][name] for config in others):
            raise UserError(f"the runs differ in {field}; set it for all (--config.{field}=VALUE)")
    # Prepared datasets, which may be too large to list here, have enough classes to hold out.
    if choosing and (first.data.path or first.data.validation_classes < 1):
        splits = Run(first).splits
        splits.training_images()
        if splits.validation is None:
            why = f"{splits.no_validation}, or name one setting for each variant"
            raise UserError(f"settings are chosen on validation images, but {why}")


def validation_score(results: Mapping[str, Any]) -> tuple[str, float]:
    """Name and value of the metric on validation images by which settings are chosen."""
    validation = results["validation"]
    scores = validation.get("best", validation["final"])["head"]
    name = selection_metric(scores)
    return name, scores[name]


def tied(grid: Sequence[Candidate], scores: Scores) -> list[Candidate]:
    """The candidates with the highest score, first the candidate that changes the fewest fields."""
    highest = max(scores[candidate][1] for candidate in grid)
    best = [candidate for candidate in grid if scores[candidate][1] == highest]
    return sorted(best, key=Candidate.num_changes)


def print_choice(scores: Scores, winners: Sequence[Sequence[Candidate]], seed: str) -> None:
    """Prints scores on validation images; the first of each variant's `winners` is chosen."""
    name, _ = next(iter(scores.values()))
    print(f"{name} of the head on the validation images, in percent, seed {seed}:")
    remarks = dict.fromkeys(itertools.chain(*winners), "tied")
    for chosen, *others in winners:
        reason = ", changes the fewest fields of those tied" if others else ""
        remarks[chosen] = f"chosen{reason}"
    rows = [
        [row.variant, str(row), row.folder(seed), f"{100 * score:.1f}", remarks.get(row, "")]
        for row, (_, score) in scores.items()
    ]
    print(aligned(rows, left=3))


def print_comparison(chosen: Sequence[Candidate], seeds: Sequence[str]) -> None:
    """Prints scores on test images, and their differences from the first, with intervals."""
    scored = [[score_queries(candidate.run(seed).path) for seed in seeds] for candidate in chosen]
    metrics = {selection_metric(runs[0][0]) for runs in scored}
    labels = [runs[0][1] for runs in scored]
    if len(metrics) > 1 or not all(np.array_equal(labels[0], other) for other in labels):
        raise UserError("the variants differ in eval.ks or in their test images")
    (metric,) = metrics
    methods = []
    for runs in scored:
        scores_of_runs = np.stack([scores[metric] for scores, _ in runs])
        methods.append(sums_by_class(scores_of_runs, labels[0]))
    means, differences_from_first = 100 * bootstrap(methods)
    of_seeds = "seed" if len(seeds) == 1 else "mean of seeds"
    print(
        f"{metric} of the head on the test images, in percent: {of_seeds} {', '.join(seeds)}, "
        "95% interval over seeds and classes, and difference from the first:"
    )
    rows = []
    for row, mean, difference in zip(chosen, means, differences_from_first, strict=True):
        cells = [row.variant, "", "{:.1f}  [{:.1f}, {:.1f}]".format(*mean)]
        cells.append("{:+.1f}  [{:+.1f}, {:+.1f}]".format(*difference) if rows else "")
        rows.append(cells)
    print(aligned(rows))
    print("folders:")
    print(aligned([[row.variant, row.folder(seed)] for row in chosen for seed in seeds]))


def sums_by_class(
    scores: Float[np.ndarray, "runs queries"], labels: Int[np.ndarray, " queries"]
) -> Sums:
    """Sums scores by label, without queries that have no match, whose scores are NaN."""
    valid = ~np.isnan(scores[0])
    _, numbers, counts = np.unique(labels[valid], return_inverse=True, return_counts=True)
    return np.stack([np.bincount(numbers, run[valid]) for run in scores]), counts


def bootstrap(methods: Sequence[Sums]) -> Float[np.ndarray, "2 methods 3"]:
    """Mean score of each method, and its difference from the first method's, with 95% intervals.

    Scores of one class are correlated, and so are scores of one run. Therefore classes and runs are
    drawn with replacement: the same classes for all methods, but runs independently. Percentiles of
    4,000 draws bound an interval (Efron and Tibshirani, An Introduction to the Bootstrap, 1993,
    Section 13.3). With few runs, the intervals are too short.

    Returns:
        Means, then differences; each row holds the estimate and the bounds of its interval.
    """
    generator = np.random.default_rng(0)
    counts = methods[0][1]

    def draw(count: int) -> Int[np.ndarray, "resamples count"]:
        return generator.multinomial(count, np.full(count, 1 / count), _RESAMPLES)

    classes = draw(len(counts))
    rows = []  # The mean of each method, then its draws.
    for totals, _ in methods:
        run_means = classes @ totals.T / (classes @ counts)[:, None]
        draws = np.mean(draw(len(totals)) * run_means, axis=1)
        rows.append([totals.sum() / (len(totals) * counts.sum()), *draws])
    means = np.array([rows, np.array(rows) - rows[0]])
    bounds = np.percentile(means[..., 1:], [2.5, 97.5], axis=-1)
    return np.stack([means[..., 0], *bounds], axis=-1)
