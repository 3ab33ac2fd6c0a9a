"""Compares variants of a configuration, each with the settings that suit it best.

python -m hypjax.tune --config=configs/glyphs.py --variant="hyp objective.temperature=0.1,0.2"
--variant="sph objective.temperature=0.1,0.2" --seeds=0,1,2: the table, once all runs are finished.

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
    """Prints the table, or what must be trained before.

    Args:
        overrides: Fields that are set in all runs.
        config: Configuration file without a variant; --config.FIELD=VALUE sets a field of all runs.
        variant: A variant, followed by fields with the values to choose from on the validation
            images, in all combinations, as in "hyp objective.temperature=0.1,0.2"; repeat the flag.
        seeds: Seeds of the runs. Settings are chosen with the first, and trained with all.
        pending: Print the arguments of python -m hypjax.main for the runs to train next.

    Example:
        python -m hypjax.tune --config=configs/glyphs.py
        --variant="hyp train.batch_size=256" --seeds=0
    """
    command.require(seeds=seeds)
    if ":" in config:
        raise UserError(f"--config is {config}; name the file, and its variants by --variant")
    from hypjax.analysis import tuning

    first = seeds[0]
    grids = [tuning.candidates(config, overrides, text) for text in variant]
    if len({len(grid) for grid in grids}) > 1:
        listed = ", ".join(f"{grid[0].variant} has {len(grid)}" for grid in grids)
        raise UserError(f"each variant needs as many settings to choose from: {listed}")
    candidates, choosing = list(itertools.chain(*grids)), len(grids[0]) > 1
    tuning.require_comparable(candidates, first, choosing=choosing)
    results = {candidate: candidate.run(first).results for candidate in candidates if choosing}
    untrained = [run.arguments(first) for run, scores in results.items() if scores is None]
    if not untrained:
        scores = {run: tuning.validation_score(results[run]) for run in results}
        winners = [tuning.tied(grid, scores) for grid in grids] if choosing else grids
        chosen = [best for best, *_ in winners]
        runs = itertools.product(chosen, seeds)
        untrained = [run.arguments(seed) for run, seed in runs if run.run(seed).results is None]
    if pending:
        print("\n".join(untrained), end="\n" if untrained else "")
    elif untrained:
        example = f"python -m hypjax.main {untrained[0]}"
        raise UserError(f"unfinished runs: {len(untrained)}, such as {example} (launch/compare.sh)")
    else:
        if choosing:
            tuning.print_choice(scores, winners, first)
        tuning.print_comparison(chosen, seeds)


if __name__ == "__main__":
    command.run(main, resumes=True)
