"""Compares variants of a configuration, each with settings chosen on validation images."""

import itertools
import pathlib
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from hypjax.assemble import open_splits
from hypjax.config import (
    Config,
    default_workdir,
    differences,
    flatten,
    identity,
    load_config,
    read_config,
)
from hypjax.errors import UserError
from hypjax.evaluate import score_queries
from hypjax.runs.tables import aligned, selection_metric
from hypjax.runs.workdir import Workdir

_RESAMPLES = 4_000
# Fields of `data` that must be equal in all runs: they choose the images that are scored.
_IMAGES = "name path labels captions split split_seed test_classes validation_classes".split()

# Scores of one method's runs, summed by class, and the number of queries of each class.
Sums = tuple[Float[np.ndarray, "runs classes"], Int[np.ndarray, " classes"]]
Scores = Mapping["Candidate", tuple[str, float]]  # Name and value of the selection metric.


class Candidate(NamedTuple):
    """A variant of a configuration file with one choice of settings, trained once per seed."""

    file: str
    variant: str
    overrides: tuple[str, ...]  # Fields to set in all candidates.
    settings: tuple[str, ...]  # Fields to set in this one, such as 'objective.temperature=0.1'.

    def __str__(self) -> str:
        """The settings, for tables."""
        return " ".join(self.settings) or "as in the file"

    @property
    def spec(self) -> str:
        """The configuration's file and variant."""
        return f"{self.file}:{self.variant}"

    def arguments(self, seed: str) -> str:
        """Arguments of `hypjax.main`, quoted for a shell."""
        fields = [*self.overrides, *self.settings, f"seed={seed}"]
        return shlex.join([f"--config={self.spec}", *(f"--config.{field}" for field in fields)])

    def config(self, seed: str) -> Config:
        """The run's configuration."""
        return load_config(self.spec, [*self.overrides, *self.settings, f"seed={seed}"])

    def folder(self, seed: str) -> str:
        """The run's default folder."""
        return default_workdir(self.config(seed), read_config(self.spec))

    def results(self, seed: str) -> dict[str, Any]:
        """The finished run's results, or {}; rejects a folder with another configuration."""
        return Workdir(pathlib.Path(self.folder(seed)), flatten(self.config(seed))).results or {}


def candidates(file: str, overrides: Sequence[str], text: str) -> list[Candidate]:
    """All combinations of a variant's settings: 'hyp objective.temperature=0.1,0.2' has two."""
    variant, *grid_axes = text.split() or [""]
    settings_by_field = []
    for axis in grid_axes:
        field, _, values = axis.partition("=")
        if not field or "" in values.split(","):
            raise UserError(f"--variant={text!r}: {axis!r} is not FIELD=VALUE,VALUE,...")
        settings_by_field.append([f"{field}={value}" for value in values.split(",")])
    combinations = itertools.product(*settings_by_field)
    return [Candidate(file, variant, tuple(overrides), settings) for settings in combinations]


def require_comparable(candidates: Sequence[Candidate], seed: str, *, choosing: bool) -> None:
    """Raises a `UserError`, before training, if runs could not be compared by their scores.

    If `choosing` among settings, the runs also need validation images.
    """
    first, *others = [flatten(candidate.config(seed)) for candidate in candidates]
    for field in ("eval.ks", *(f"data.{name}" for name in _IMAGES)):
        if any(fields[field] != first[field] for fields in others):
            raise UserError(f"the runs differ in {field}; set it for all (--config.{field}=VALUE)")
    if first["data.split"] == "none":
        raise UserError("runs are compared on test images; leave out --config.data.split=none")
    # Prepared datasets, which may be too large to list here, have enough classes to hold out.
    if choosing and (first["data.path"] or first["data.validation_classes"] < 1):
        splits = open_splits(candidates[0].config(seed))
        splits.training_images()  # Refuses a dataset without any.
        if splits.validation is None:
            why = f"{splits.no_validation}, or name one setting for each variant"
            raise UserError(f"settings are chosen on validation images, but {why}")


def unfinished(candidates: Sequence[Candidate], seeds: Sequence[str]) -> list[str]:
    """Arguments of `hypjax.main` for each run without results."""
    runs = itertools.product(candidates, seeds)
    return [row.arguments(seed) for row, seed in runs if not row.results(seed)]


def validation_scores(candidates: Sequence[Candidate], seed: str) -> Scores:
    """Scores of finished runs on the validation images, by which settings are chosen."""
    scores = {}
    for candidate in candidates:
        validation = candidate.results(seed)["validation"]
        recalls = validation.get("best", validation["final"])["head"]
        metric = selection_metric(recalls)
        scores[candidate] = metric, recalls[metric]
    return scores


def tied(grid: Sequence[Candidate], scores: Scores) -> list[Candidate]:
    """The candidates with the highest score, first the candidate that changes the fewest fields."""

    def num_changes(candidate: Candidate) -> int:
        in_file, changed = read_config(candidate.spec), candidate.config("0")
        return len(differences(identity(flatten(in_file)), identity(flatten(changed))))

    highest = max(scores[candidate][1] for candidate in grid)
    return sorted((x for x in grid if scores[x][1] == highest), key=num_changes)


def print_choice(scores: Scores, winners: Sequence[Sequence[Candidate]], seed: str) -> None:
    """Prints scores on validation images; the first of each variant's `winners` is chosen."""
    metric, _ = next(iter(scores.values()))
    print(f"{metric} of the head on the validation images, in percent, seed {seed}:")
    remarks = dict.fromkeys(itertools.chain(*winners), "tied")
    for chosen, *others in winners:
        remarks[chosen] = "chosen, changes the fewest fields of those tied" if others else "chosen"
    rows = [
        [row.variant, str(row), row.folder(seed), f"{100 * score:.1f}", remarks.get(row, "")]
        for row, (_, score) in scores.items()
    ]
    print(aligned(rows, left=3))


def print_comparison(chosen: Sequence[Candidate], seeds: Sequence[str]) -> None:
    """Prints scores on test images, and their differences from the first, with intervals."""
    folders = [[pathlib.Path(row.folder(seed)) for seed in seeds] for row in chosen]
    runs = [[score_queries(folder) for folder in of_method] for of_method in folders]
    first_scores, labels = runs[0][0]
    metric = selection_metric(first_scores)
    methods = []
    for seed_runs in runs:
        scores, classes = seed_runs[0]
        if selection_metric(scores) != metric or not np.array_equal(classes, labels):
            raise UserError("the variants differ in eval.ks or in their test images")
        methods.append(sums_by_class(np.stack([scores[metric] for scores, _ in seed_runs]), labels))
    means, differences_from_first = 100 * bootstrap(methods)
    of_seeds = "seed" if len(seeds) == 1 else "mean of seeds"
    print(
        f"{metric} of the head on the test images, in percent: {of_seeds} {', '.join(seeds)}, "
        "95% interval over seeds and classes, and difference from the first:"
    )
    rows = []
    for row, mean, difference in zip(chosen, means, differences_from_first, strict=True):
        interval = "{:.1f}  [{:.1f}, {:.1f}]".format(*mean)
        rows.append([row.variant, "", interval, "{:+.1f}  [{:+.1f}, {:+.1f}]".format(*difference)])
    rows[0][-1] = ""  # The first method's difference from itself.
    print(aligned(rows))
    print("folders:")
    print(aligned([[row.variant, row.folder(seed)] for row in chosen for seed in seeds]))


def sums_by_class(
    scores: Float[np.ndarray, "runs queries"], labels: Int[np.ndarray, " queries"]
) -> Sums:
    """Sums scores by label, without queries that have no match, whose scores are NaN."""
    valid = ~np.isnan(scores[0])
    _, classes, counts = np.unique(labels[valid], return_inverse=True, return_counts=True)
    return np.stack([np.bincount(classes, run[valid]) for run in scores]), counts


def bootstrap(methods: Sequence[Sums]) -> Float[np.ndarray, "2 methods 3"]:
    """Mean score of each method, and its difference from the first method's, with 95% intervals.

    Scores of one class are correlated, and so are scores of one run. Therefore classes and runs are
    drawn with replacement: the same classes for all methods, but runs independently. Percentiles of
    4,000 draws bound an interval (Efron and Tibshirani, An Introduction to the Bootstrap, 1993,
    Section 13.3). With few runs, the intervals are too short.

    Returns:
        Means, then differences; each row holds the estimate and the bounds of its interval.
    """
    generator, counts = np.random.default_rng(0), methods[0][1]

    def draw_counts(count: int) -> Int[np.ndarray, "resamples count"]:
        return generator.multinomial(count, np.full(count, 1 / count), _RESAMPLES)

    class_draws = draw_counts(len(counts))
    rows = []  # The mean of each method, then its resampled means.
    for sums, _ in methods:
        run_means = class_draws @ sums.T / (class_draws @ counts)[:, None]
        resampled_means = np.mean(draw_counts(len(sums)) * run_means, axis=1)
        rows.append([sums.sum() / (len(sums) * counts.sum()), *resampled_means])
    means = np.array([rows, np.array(rows) - rows[0]])
    return np.stack([means[..., 0], *np.percentile(means[..., 1:], [2.5, 97.5], axis=-1)], axis=-1)
