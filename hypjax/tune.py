"""Compares variants of a configuration, each with the settings that suit it best.

python -m hypjax.tune --config=configs/glyphs.py --variant="hyp objective.temperature=0.1,0.2"
--variant="sph objective.temperature=0.1,0.2" --seeds=0,1,2: the table, once all runs are finished.

launch/compare.sh, with the same arguments, trains the runs first.
"""

from __future__ import annotations

import itertools
import pathlib
import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from absl import flags

from hypjax import command
from hypjax.errors import UserError

if TYPE_CHECKING:  # These import JAX, or what no help text needs.
    import numpy as np
    from jaxtyping import Int
    from ml_collections import ConfigDict

    from hypjax.analysis.intervals import Sums

EXAMPLE = (
    "python -m hypjax.tune --config=configs/glyphs.py"
    ' --variant="hyp train.batch_size=256" --seeds=0'
)
FLAGS = flags.FlagValues()
_CONFIG = flags.DEFINE_string(
    "config",
    None,
    "Configuration file of all runs, without a variant. --config.FIELD=VALUE sets one of its "
    "fields in all of them.",
    flag_values=FLAGS,
)
_VARIANTS = flags.DEFINE_multi_string(
    "variant",
    [],
    "A variant, followed by fields with the values to choose from on the validation classes, as in "
    '"hyp objective.temperature=0.1,0.2"; repeat the flag. Several fields are tried in all '
    "combinations.",
    flag_values=FLAGS,
)
_SEEDS = flags.DEFINE_list(
    "seeds",
    ["0", "1", "2"],
    "Seeds of the runs. Settings are chosen with the first; the chosen ones are trained with all.",
    flag_values=FLAGS,
)
_PENDING = flags.DEFINE_bool(
    "pending",
    False,
    "Print the arguments of python -m hypjax.main for the runs to train next, one line each, "
    "instead of the table.",
    flag_values=FLAGS,
)


class Candidate(NamedTuple):
    """A variant with one choice of settings.

    Attributes:
        variant: The variant.
        settings: Overrides, such as 'objective.temperature=0.1'.
    """

    variant: str
    settings: tuple[str, ...]

    def __str__(self) -> str:
        """The settings, as a table shows them."""
        return " ".join(self.settings) or "as in the file"


class Runs(NamedTuple):
    """Where the runs of a comparison are.

    Attributes:
        config: The configuration file.
        overrides: Overrides of all runs.
    """

    config: str
    overrides: tuple[str, ...]

    def arguments(self, candidate: Candidate, seed: str) -> str:
        """Arguments of `hypjax.main`, quoted for a shell."""
        fields = (*self.overrides, *candidate.settings, f"seed={seed}")
        chosen = f"--config={self.config}:{candidate.variant}"
        return shlex.join([chosen, *(f"--config.{field}" for field in fields)])

    def load(self, candidate: Candidate, seed: str) -> ConfigDict:
        """The run's configuration."""
        from hypjax.config import load_config

        fields = (*self.overrides, *candidate.settings, f"seed={seed}")
        return load_config(f"{self.config}:{candidate.variant}", fields)

    def folder(self, candidate: Candidate, seed: str) -> pathlib.Path:
        """The run's default folder."""
        from hypjax.config import default_workdir, read_config

        unchanged = read_config(f"{self.config}:{candidate.variant}")
        return pathlib.Path(default_workdir(self.load(candidate, seed), unchanged))

    def results(self, candidate: Candidate, seed: str) -> dict[str, Any] | None:
        """What the run's results.json holds; None if it is unfinished.

        Raises:
            UserError: The folder holds a run with another configuration.
        """
        from hypjax.runs.workdir import Workdir

        return Workdir(self.folder(candidate, seed), self.load(candidate, seed)).results


def main(overrides: list[str]) -> None:
    """Prints the table, or what must be trained before."""
    command.require(_CONFIG, _VARIANTS, _SEEDS)
    if ":" in _CONFIG.value:
        raise UserError(f"--config={_CONFIG.value} names a variant; name variants with --variant")
    runs, seeds = Runs(_CONFIG.value, tuple(overrides)), _SEEDS.value
    grids = [_candidates(text) for text in _VARIANTS.value]
    _check(grids, seeds)
    _check_settings(runs, [each for grid in grids for each in grid], seeds[0])
    for seed in seeds:
        runs.load(grids[0][0], seed)  # Later seeds are trained last; an error is reported now.
    tried = {each: runs.results(each, seeds[0]) for grid in grids for each in grid}
    pending = [runs.arguments(each, seeds[0]) for each, found in tried.items() if found is None]
    chosen: list[Candidate] = []
    if not pending:
        chosen = [_best({each: tried[each] for each in grid}) for grid in grids]
        pending = [
            runs.arguments(each, seed)
            for each, seed in itertools.product(chosen, seeds)
            if runs.results(each, seed) is None
        ]
    if _PENDING.value:
        print("\n".join(pending), end="\n" if pending else "")
    elif pending:
        raise UserError(
            f"{len(pending)} runs are not finished, such as: python -m hypjax.main {pending[0]} "
            "(launch/compare.sh trains them all)"
        )
    else:
        _print_choice(tried, chosen)
        _print_table(runs, chosen, seeds)


def _candidates(text: str) -> list[Candidate]:
    """All settings of a value of --variant."""
    variant, *fields = text.split() or [""]
    for field in fields:
        if not all(field.partition("=")) or "" in field.partition("=")[2].split(","):
            raise UserError(f"--variant={text!r}: {field!r} is not FIELD=VALUE,VALUE,...")
    values = [
        [f"{name}={value}" for value in listed.split(",")]
        for name, _, listed in (field.partition("=") for field in fields)
    ]
    return [Candidate(variant, settings) for settings in itertools.product(*values)]


def _check(grids: Sequence[Sequence[Candidate]], seeds: Sequence[str]) -> None:
    """Refuses what would not be a fair comparison."""
    named = [grid[0].variant for grid in grids]
    for what, values in (("--variant", named), ("--seeds", list(seeds))):
        if twice := [value for value in values if values.count(value) > 1]:
            raise UserError(f"{what} names {twice[0]} twice")
    sizes = {grid[0].variant: len(grid) for grid in grids}
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{variant} has {size}" for variant, size in sizes.items())
        raise UserError(f"each variant needs as many settings to choose from: {listed}")


def _check_settings(runs: Runs, candidates: Sequence[Candidate], seed: str) -> None:
    """Refuses settings that are no choice."""
    from hypjax.objectives import unused_fields

    named: dict[pathlib.Path, Candidate] = {}
    for candidate in candidates:
        objective = runs.load(candidate, seed).objective
        for field in (setting.partition("=")[0] for setting in candidate.settings):
            if field.removeprefix("objective.") in unused_fields(objective):
                raise UserError(
                    f"{candidate.variant} has no use for {field}, since objective.space is "
                    f"{objective.space}"
                )
        other = named.setdefault(runs.folder(candidate, seed), candidate)
        if other is not candidate:
            raise UserError(
                f"{candidate.variant} with {candidate} is the same run as {other.variant} with "
                f"{other}"
            )


def _validation_score(results: Mapping[str, Any]) -> tuple[str, float]:
    """The score by which settings are chosen: the head's first recall on validation classes."""
    from hypjax.runs.tables import selecting

    held_out = results["validation"]
    scores = held_out.get("best", held_out["final"])["head"]
    name = selecting(scores)
    return name, scores[name]


def _best(grid: Mapping[Candidate, Mapping[str, Any]]) -> Candidate:
    """The settings with the best score on validation classes; the first one of equals."""
    for candidate, results in grid.items():
        if not results.get("validation"):
            raise UserError(
                f"the run of {candidate.variant} with {candidate} has no validation classes to "
                "choose by; set config.data.validation_classes"
            )
    return max(grid, key=lambda candidate: _validation_score(grid[candidate])[1])


def _print_choice(
    tried: Mapping[Candidate, Mapping[str, Any]], chosen: Sequence[Candidate]
) -> None:
    width = max(len(candidate.variant) for candidate in tried)
    lines = []
    for candidate, results in tried.items():
        mark = "  chosen" if candidate in chosen else ""
        name, score = _validation_score(results)
        lines.append(f"  {candidate.variant:<{width}}  {100 * score:5.1f}  {candidate}{mark}")
    print(f"{name} of the head on the validation classes, in percent, seed {_SEEDS.value[0]}:")
    print("\n".join(lines))


def _print_table(runs: Runs, chosen: Sequence[Candidate], seeds: Sequence[str]) -> None:
    import numpy as np

    from hypjax.analysis.intervals import bootstrap

    tested = [_test_scores([runs.folder(each, seed) for seed in seeds]) for each in chosen]
    names, labels = [name for name, _, _ in tested], [labels for _, labels, _ in tested]
    if len(set(names)) > 1 or not all(np.array_equal(labels[0], each) for each in labels):
        raise UserError("the variants differ in eval.ks or in their test images")
    name, first = names[0], chosen[0].variant
    means, differences = bootstrap([sums for _, _, sums in tested])
    over = "seeds and classes" if len(seeds) > 1 else "classes alone, since there is one seed"
    print(
        f"{name} of the head on the test classes, in percent: mean of seeds {', '.join(seeds)}, "
        f"95% interval over {over}, and difference from the first:"
    )
    width = max(len(candidate.variant) for candidate in chosen)
    for candidate, mean, difference in zip(chosen, means, differences, strict=True):
        low, high = 100 * mean.low, 100 * mean.high
        line = f"  {candidate.variant:<{width}}  {100 * mean.mean:5.1f}  [{low:.1f}, {high:.1f}]"
        if candidate.variant != first:
            low, high = 100 * difference.low, 100 * difference.high
            line += f"  {100 * difference.mean:+5.1f}  [{low:+.1f}, {high:+.1f}]"
        print(line)


def _test_scores(folders: Sequence[pathlib.Path]) -> tuple[str, Int[np.ndarray, " queries"], Sums]:
    """Name of the head's first recall, labels, and its sums by class, of runs of one method."""
    import numpy as np

    from hypjax.analysis.intervals import Sums
    from hypjax.evaluate import score_queries
    from hypjax.runs.tables import selecting

    found = [score_queries(folder) for folder in folders]
    name = selecting(found[0].scores["head"])
    scores = np.stack([each.scores["head"][name] for each in found])
    return name, found[0].labels, Sums.of(scores, found[0].labels)


if __name__ == "__main__":
    command.run(main, FLAGS, EXAMPLE, resumes=True)
