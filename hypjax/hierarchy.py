"""Shows the hierarchy that trained runs find among test images, as trees, scores and figures."""

import pathlib

from hypjax import command
from hypjax.errors import writing

EXAMPLE = "python -m hypjax.hierarchy --workdir=runs/glyphs-hyp --output=hierarchy"
FLAGS = command.Flags(
    workdir=command.RUNS,
    output=command.string(
        "Folder to write: hierarchy.json with all numbers, and a folder of trees and figures for "
        "each run."
    ),
    **command.CHOSEN,
)


def main() -> None:
    """Prints scores of the trees of runs, and writes trees and figures."""
    FLAGS.require("workdir")
    folder = FLAGS.output and pathlib.Path(FLAGS.output).expanduser()
    if folder:
        with writing(folder):
            folder.mkdir(exist_ok=True)
        command.require_writable(folder)
    from hypjax.analysis import hierarchy
    from hypjax.analysis.run_embeddings import ChosenImages, open_runs
    from hypjax.runs.tables import noted, print_notes

    runs = open_runs(FLAGS.workdir)
    images = ChosenImages.of(runs[0], FLAGS.images, FLAGS.seed)
    hierarchies = [hierarchy.hierarchy_of_run(run, images) for run in runs]
    scores = [found.scores for found in hierarchies]
    print(f"trees of {images.summary}:\n{hierarchy.tables(scores)}")
    print_notes(notes := noted(runs[0].splits.notes))
    if folder:
        files = [file for found in hierarchies for file in hierarchy.write(found, images, folder)]
        numbers = {"images": images.indices.tolist(), "runs": scores, **notes}
        command.write_numbers(folder / "hierarchy.json", hierarchy.as_json(numbers), *files)


if __name__ == "__main__":
    command.run(main, FLAGS, EXAMPLE)
