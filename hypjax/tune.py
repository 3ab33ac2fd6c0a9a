"""Compares variants of a configuration, each with its best settings.

launch/compare.sh, with the same arguments, trains the runs first.
"""

import itertools

from hypjax import command
from hypjax.errors import UserError


def main(
    *,
    overrides: list[str],
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
    command.require_one(seeds=seeds)
    if ":" in config:
        raise UserError(f"--config is {config}; name the file, and its variants by --variant")
    from hypjax.analysis import tuning

    grids = [tuning.candidates(config, overrides, text) for text in variant]
    if len({len(grid) for grid in grids}) > 1:
        counts = ", ".join(f"{grid[0].variant} has {len(grid)}" for grid in grids)
        raise UserError(f"all variants need equally many settings to choose from: {counts}")
    choosing = len(grids[0]) > 1
    candidates = list(itertools.chain(*grids))
    tuning.require_comparable(candidates, seeds[0], choosing=choosing)
    winners = grids  # Each variant's one candidate, or its best candidates, the chosen one first.
    unfinished = tuning.unfinished(candidates, seeds[:1]) if choosing else []
    if choosing and not unfinished:
        scores = tuning.validation_scores(candidates, seeds[0])
        winners = [tuning.tied(grid, scores) for grid in grids]
    chosen = [tied[0] for tied in winners]
    unfinished = unfinished or tuning.unfinished(chosen, seeds)
    if pending:
        for arguments in unfinished:
            print(arguments)
    elif unfinished:
        count = f"unfinished runs: {len(unfinished)}"
        example = f"python -m hypjax.main {unfinished[0]}"
        raise UserError(f"{count}, such as {example} (launch/compare.sh trains them)")
    else:
        if choosing:
            tuning.print_choice(scores, winners, seeds[0])
        tuning.print_comparison(chosen, seeds)


if __name__ == "__main__":
    command.run(main, resumes=True)
