"""Variants of a configuration, each with the settings that suit it best on validation images."""

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
from hypjax.runs.tables import aligned, selecting
from hypjax.runs.workdir import Workdir

_RESAMPLES = 4_000
# Fields of `data` that select the images of the scores, and must be equal in all runs.
_IMAGES = ("name", "path", "labels", "split", "split_seed", "test_classes", "validation_classes")

# Scores of one method's runs, summed by class, and the number of queries of each class.
Sums = tuple[Float[np.ndarray, "runs classes"], Int[np.ndarray, " classes"]]
Scores = Mapping["Candidate", tuple[str, float]]  # Name and value of the recall that chooses.


class Candidate(NamedTuple):
    """A variant of a configuration file, with one choice of settings; a run for each seed."""

    file: str
    variant: str
    overrides: tuple[str, ...]  # Of all candidates.
    settings: tuple[str, ...]  # Further overrides, such as 'objective.temperature=0.1'.

    def __str__(self) -> str:
        """The settings, as a table shows them."""
        return " ".join(self.settings) or "as in the file"

    @property
    def spec(self) -> str:
        """The configuration's file and variant."""
        return f"{self.file}:{self.variant}"

    def _changes(self, seed: str) -> list[str]:
        return [*self.overrides, *self.settings, f"seed={seed}"]

    def arguments(self, seed: str) -> str:
        """Arguments of `hypjax.main`, quoted for a shell."""
        fields = (f"--config.{field}" for field in self._changes(seed))
        return shlex.join([f"--config={self.spec}", *fields])

    def config(self, seed: str) -> ConfigDict:
        """The run's configuration."""
        return load_config(self.spec, self._changes(seed))

    def folder(self, seed: str) -> str:
        """The run's default folder."""
        return default_workdir(self.config(seed), read_config(self.spec))

    def run(self, seed: str) -> Workdir:
        """Opens the run's default folder; refuses the folder of another configuration."""
        return Workdir(pathlib.Path(self.folder(seed)), self.config(seed))

    def num_changes(self) -> int:
        """Number of fields in which the settings differ from the file."""
        return len(differences(identity(read_config(self.spec)), identity(self.config("0"))))


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
    combinations = itertools.product(*values)
    return [Candidate(file, variant, overrides, settings) for settings in combinations]


def require_comparable(candidates: Sequence[Candidate], seed: str, *, choosing: bool) -> None:
    """Refuses runs whose scores cannot be compared, or not chosen by; call it before training."""
    first, *others = [candidate.config(seed) for candidate in candidates]
    for field in ("eval.ks", *(f"data.{name}" for name in _IMAGES)):
        group, name = field.split(".")
        if any(config[group][name] != first[group][name] for config in others):
            raise UserError(f"the runs differ in {field}; set it for all (--config.{field}=VALUE)")
    # Of a prepared dataset, which may be large, any number of classes can be held out.
    if choosing and (first.data.path or first.data.validation_classes < 1):
        splits = Run(first).splits
        splits.training_images()
        if splits.validation is None:
            why = f"{splits.no_validation}, or name one setting for each variant"
            raise UserError(f"settings are chosen on validation images, but {why}")


def validation_score(results: Mapping[str, Any]) -> tuple[str, float]:
    """Name and value of the recall on validation images that chooses settings."""
    held_out = results["validation"]
    scores = held_out.get("best", held_out["final"])["head"]
    name = selecting(scores)
    return name, scores[name]


def tied(grid: Sequence[Candidate], scores: Scores) -> list[Candidate]:
    """The candidates of the highest score, the one that changes the fewest fields first."""
    highest = max(scores[candidate][1] for candidate in grid)
    equal = [candidate for candidate in grid if scores[candidate][1] == highest]
    return sorted(equal, key=Candidate.num_changes)


def print_choice(scores: Scores, winners: Sequence[Sequence[Candidate]], seed: str) -> None:
    """Prints the scores on validation images; of each variant's winners, the first is chosen."""
    name, _ = next(iter(scores.values()))
    print(f"{name} of the head on the validation images, in percent, seed {seed}:")
    remarks = dict.fromkeys(itertools.chain(*winners), "tied")
    for chosen, *tied_with in winners:
        remarks[chosen] = "chosen" + ", changes the fewest fields of those tied" * bool(tied_with)
    rows = [
        [row.variant, str(row), row.folder(seed), f"{100 * score:.1f}", remarks.get(row, "")]
        for row, (_, score) in scores.items()
    ]
    print(aligned(rows, left=3))


def print_comparison(chosen: Sequence[Candidate], seeds: Sequence[str]) -> None:
    """Prints scores on test images, and their differences from the first, with intervals."""
    scored = [[score_queries(candidate.run(seed).path) for seed in seeds] for candidate in chosen]
    metrics, labels = {selecting(runs[0][0]) for runs in scored}, [runs[0][1] for runs in scored]
    if len(metrics) > 1 or not all(np.array_equal(labels[0], other) for other in labels):
        raise UserError("the variants differ in eval.ks or in their test images")
    (metric,) = metrics
    scores = (np.stack([of_run[metric] for of_run, _ in runs]) for runs in scored)
    methods = [sums_by_class(of_method, labels[0]) for of_method in scores]
    of_seeds = "seed" if len(seeds) == 1 else "mean of seeds"
    print(
        f"{metric} of the head on the test images, in percent: {of_seeds} {', '.join(seeds)}, "
        "95% interval over seeds and classes, and difference from the first:"
    )
    rows = []
    for row, mean, other in zip(chosen, *(100 * bootstrap(methods)), strict=True):
        rows.append([row.variant, "", "{:.1f}  [{:.1f}, {:.1f}]".format(*mean)])
        rows[-1] += ["{:+.1f}  [{:+.1f}, {:+.1f}]".format(*other)] if len(rows) > 1 else [""]
    print(aligned(rows))
    print("folders:")
    print(aligned([[row.variant, row.folder(seed)] for row in chosen for seed in seeds]))


def sums_by_class(
    scores: Float[np.ndarray, "runs queries"], labels: Int[np.ndarray, " queries"]
) -> Sums:
    """Sums scores by label; NaN marks queries without a match, which do not count."""
    valid = ~np.isnan(scores[0])
    _, numbers, counts = np.unique(labels[valid], return_inverse=True, return_counts=True)
    return np.stack([np.bincount(numbers, run[valid]) for run in scores]), counts


def bootstrap(methods: Sequence[Sums]) -> Float[np.ndarray, "2 methods 3"]:
    """Mean score of each method, and its difference from the first's, with 95% intervals.

    Queries of one class are alike, and so are queries of one run. So classes and runs are drawn
    with replacement: the same classes for all methods, but runs separately. Percentiles of 4,000
    draws bound an interval (Efron and Tibshirani, An Introduction to the Bootstrap, 1993, Section
    13.3). Few runs give an interval that is too short.
    """
    generator = np.random.default_rng(0)
    counts = methods[0][1]

    def draw(count: int) -> Int[np.ndarray, "resamples count"]:
        return generator.multinomial(count, np.full(count, 1 / count), _RESAMPLES)

    classes = draw(len(counts))
    rows = []  # The mean of each method, then its draws.
    for totals, _ in methods:
        of_runs = classes @ totals.T / (classes @ counts)[:, None]
        draws = np.mean(draw(len(totals)) * of_runs, axis=1)
        rows.append([totals.sum() / (len(totals) * counts.sum()), *draws])
    means = np.array([rows, np.array(rows) - rows[0]])
    bounds = np.percentile(means[..., 1:], [2.5, 97.5], axis=-1)
    return np.stack([means[..., 0], *bounds], axis=-1)
