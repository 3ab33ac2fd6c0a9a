"""Shows the hierarchy that trained runs find among test images, as trees, scores and figures."""

import pathlib

from hypjax import command
from hypjax.errors import UserError

EXAMPLE = "python -m hypjax.hierarchy --workdir=runs/glyphs-hyp --output=hierarchy"
FLAGS = command.Flags()
_WORKDIRS = FLAGS.runs()
_OUTPUT = FLAGS.string(
    "output",
    None,
    "Folder to write: hierarchy.json with all numbers, and a folder of trees and figures for each "
    "run.",
)
_IMAGES = FLAGS.integer(
    "images",
    5000,
    "Largest number of test images; of more, random classes are chosen. Memory and time grow with "
    "its square.",
    lower_bound=3,
)
_SEED = FLAGS.integer("seed", 0, "Seed of the choice of images.", lower_bound=0)


def main(overrides: list[str]) -> None:
    """Prints scores of the trees of runs, and writes trees and figures."""
    names = command.run_names(_WORKDIRS)
    command.refuse_overrides(overrides)
    folder = _made(pathlib.Path(_OUTPUT.value).expanduser()) if _OUTPUT.value else None
    from hypjax.analysis import hierarchy, known_hierarchy
    from hypjax.analysis.run_embeddings import ChosenImages, open_runs
    from hypjax.runs.tables import noted, print_notes
    from hypjax.system import console
    from hypjax.system.caches import keep_compiled_programs

    keep_compiled_programs()
    runs = open_runs(names)
    images = ChosenImages.of(runs[0], _IMAGES.value, _SEED.value)
    found = []
    for run in runs:
        console.say(f"embedding the test images with the model of {run.name}")
        own = hierarchy.hierarchy_of_run(run, images)
        found.append(own.scores)
        if folder:
            within = _made(folder / run.name.strip("/").replace("/", "-"))
            files = hierarchy.write(own, images, within)
            console.say(f"wrote {', '.join(map(str, files))}")
    print(f"trees of {images.summary}:\n{hierarchy.scores_table(found)}")
    if table := hierarchy.radii_table(found):
        print(f"\n{table}")
    if len(images.groupings) > 1:
        levels = ", ".join(found[0]["known_hierarchy"]["levels"])
        print(f"\nfirst hits, and distances in the known hierarchy of {levels}:")
        print(known_hierarchy.agreement_table(found))
        print("\nmedian distance from the origin (share of nodes nearer than their children):")
        print(known_hierarchy.radii_table(found))
    notes = noted(runs[0].splits.notes)
    print_notes(notes)
    if folder:
        of_runs = [hierarchy.as_json(each) for each in found]
        numbers = {"images": images.indices.tolist(), "runs": of_runs, **notes}
        command.write_numbers(folder / "hierarchy.json", numbers)
        console.say(f"wrote {folder / 'hierarchy.json'}")


def _made(folder: pathlib.Path) -> pathlib.Path:
    """Creates a folder unless it exists, and makes sure that files can be written to it."""
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot create the folder {folder} ({error.strerror})") from error
    command.require_writable(folder)
    return folder


if __name__ == "__main__":
    command.run(main, FLAGS, EXAMPLE)
