"""Shows the hierarchy of test images in trained runs: trees, scores and figures."""

import json
import pathlib
from typing import Annotated

from hypjax import command
from hypjax.errors import writing
from hypjax.fields import at_least


def main(
    *,
    overrides: list[str],
    workdir: list[str],
    output: str | None = None,
    images: Annotated[int, at_least(3)] = 5000,
    seed: command.Natural = 0,
) -> None:
    """Prints scores of the runs' trees, and can write the trees and figures.

    Args:
        overrides: Where the images are if they have moved, as data.path=photos.
        workdir: Folder or URL of a trained run; repeat the flag to compare runs of one dataset.
        output: Folder for hierarchy.json with all numbers, and each run's trees and figures.
        images: Largest number of test images, from random classes; memory and time grow with its
            square.
        seed: Seed of the random choice of images.

    Example:
        python -m hypjax.hierarchy --workdir=runs/glyphs-hyp --output=hierarchy
    """
    folder = pathlib.Path(output).expanduser() if output else None
    if folder:
        with writing(folder):
            folder.mkdir(exist_ok=True)
        command.require_writable(folder)
    from hypjax.analysis import hierarchy
    from hypjax.analysis.run_embeddings import ChosenImages, open_runs
    from hypjax.runs.tables import noted, print_notes

    runs = open_runs(workdir, overrides)
    chosen = ChosenImages.of(runs[0], images, seed)
    hierarchies = [hierarchy.hierarchy_of_run(run, chosen) for run in runs]
    scores = [of_run.scores for of_run in hierarchies]
    print(f"trees of {chosen.summary}:\n{hierarchy.tables(scores)}")
    notes = print_notes(noted(runs[0].splits.notes))
    if folder:
        files = [path for of_run in hierarchies for path in hierarchy.write(of_run, chosen, folder)]
        numbers = {"images": chosen.indices.tolist(), "runs": scores, **notes}
        # JSON has no NaN: write null.
        numbers = json.loads(json.dumps(numbers), parse_constant=lambda _: None)
        command.write_numbers(folder / "hierarchy.json", numbers, *files)


if __name__ == "__main__":
    command.run(main)
