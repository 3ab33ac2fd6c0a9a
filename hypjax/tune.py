"""Compares variants of a configuration, each with its best settings.

launch/compare.sh, with the same arguments, trains the runs first.
"""

import itertools
from collections.abc import Sequence

from hypjax import command
from hypjax.errors import UserError


def main(
    *,
    overrides: Sequence[str] = (),
    config: str,
    variant: list[str],
    seeds: tuple[str, ...] = ("0", "1", "2"),
    pending: bool = False,
) -> None:
    """Prints the table, or the runs to train first.

    Args:
        overrides: Fields to set in all runs, as FIELD=VALUE.
        config: Configuration file without a variant; --config.FIELD=VALUE sets a field of all runs.
        variant: A variant, followed by fields with the values to choose from on the validation
            images, in all combinations, as in "hyp objective.temperature=0.1,0.2"; repeat the flag.
        seeds: Seeds of the runs. The first seed's runs choose the settings, which all seeds use.
        pending: Print the arguments of python -m hypjax.main for the runs to train next.

    Example:
        python -m hypjax.tune --config=configs/glyphs.py --seeds=0,1,2
        --variant="hyp objective.temperature=0.1,0.2" --variant="sph objective.temperature=0.1,0.2"
    """
    command.require(seeds=seeds)
    if ":" in config:
        raise UserError(f"--config is {config}; name the file, and its variants by --variant")
    from hypjax.analysis import tuning

    grids = [tuning.candidates(config, overrides, text) for text in variant]
    if len({len(grid) for grid in grids}) > 1:
        counts = ", ".join(f"{grid[0].variant} has {len(grid)}" for grid in grids)
        raise UserError(f"all variants need equally many settings to choose from: {counts}")
    candidates, choosing = list(itertools.chain(*grids)), len(grids[0]) > 1
    tuning.require_comparable(candidates, seeds[0], choosing=choosing)
    unfinished, winners = [], grids
    if choosing:
        results = {candidate: candidate.run(seeds[0]).results for candidate in candidates}
        unfinished = [run.arguments(seeds[0]) for run in candidates if results[run] is None]
        if not unfinished:
            scores = {run: tuning.validation_score(results[run]) for run in candidates}
            winners = [tuning.tied(grid, scores) for grid in grids]
    chosen = [tied[0] for tied in winners]
    if not unfinished:
        runs = itertools.product(chosen, seeds)
        unfinished = [run.arguments(seed) for run, seed in runs if run.run(seed).results is None]
    if pending:
        for arguments in unfinished:
            print(arguments)
    elif unfinished:
        example = f"python -m hypjax.main {unfinished[0]}"
        runs = f"unfinished runs: {len(unfinished)}, such as {example}"
        raise UserError(f"{runs} (launch/compare.sh trains them)")
    else:
        if choosing:
            tuning.print_choice(scores, winners, seeds[0])
        tuning.print_comparison(chosen, seeds)


if __name__ == "__main__":
    command.run(main, resumes=True)
