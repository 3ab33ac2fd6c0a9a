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
        config: Configuration file of all runs, without a variant. --config.FIELD=VALUE sets one of
            its fields in all of them.
        variant: A variant, followed by fields with the values to choose from on the validation
            classes, as in "hyp objective.temperature=0.1,0.2"; repeat the flag. Several fields are
            tried in all combinations.
        seeds: Seeds of the runs. Settings are chosen with the first; the chosen ones are trained
            with all.
        pending: Print the arguments of python -m hypjax.main for the runs to train next, one line
            each, instead of the table.

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
    candidates = list(itertools.chain(*grids))
    results = {one: one.run(first).results for one in candidates} if len(grids[0]) > 1 else {}
    tuning.require_comparable(
        candidates, first, choosing=bool(results) and not any(results.values())
    )
    untrained = [one.arguments(first) for one, scored in results.items() if scored is None]
    winners = grids
    if not untrained:
        scores = {one: tuning.validation_score(one, scored) for one, scored in results.items()}
        if scores:
            winners = [tuning.tied(grid, scores) for grid in grids]
        runs = itertools.product([best for best, *_ in winners], seeds)
        untrained = [one.arguments(seed) for one, seed in runs if one.run(seed).results is None]
    if pending:
        print("\n".join(untrained), end="\n" if untrained else "")
    elif untrained:
        raise UserError(
            f"unfinished runs: {len(untrained)}, such as python -m hypjax.main {untrained[0]} "
            "(launch/compare.sh trains them all)"
        )
    else:
        if scores:
            tuning.print_choice(scores, winners, first)
        tuning.print_comparison([best for best, *_ in winners], seeds)


if __name__ == "__main__":
    command.run(main, resumes=True)
