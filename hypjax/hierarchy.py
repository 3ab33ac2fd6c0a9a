"""Shows the hierarchy that trained runs find among test images, as trees, scores and figures."""

from __future__ import annotations

import pathlib
from typing import TYPE_CHECKING

from absl import flags

from hypjax import command
from hypjax.errors import UserError

if TYPE_CHECKING:  # They import JAX or NumPy.
    from hypjax.analysis.hierarchy import Hierarchy, Images

EXAMPLE = "python -m hypjax.hierarchy --workdir=runs/glyphs-hyp --output=hierarchy"
FLAGS = flags.FlagValues()
_WORKDIRS = flags.DEFINE_multi_string(
    "workdir",
    [],
    "Folder of a trained run, or its URL; repeat the flag to compare runs of one dataset.",
    flag_values=FLAGS,
)
_OUTPUT = flags.DEFINE_string(
    "output",
    None,
    "Folder to write: hierarchy.json with all numbers, and a folder of trees and figures for each "
    "run.",
    flag_values=FLAGS,
)
_IMAGES = flags.DEFINE_integer(
    "images",
    5000,
    "Largest number of test images; of more, random classes are chosen. Memory and time grow with "
    "its square.",
    lower_bound=3,
    flag_values=FLAGS,
)
_SEED = flags.DEFINE_integer(
    "seed", 0, "Seed of the choice of images.", lower_bound=0, flag_values=FLAGS
)
_ROWS = 8  # Proxies whose images are shown.
_COLUMNS = 10  # Images of each.


def main(overrides: list[str]) -> None:
    """Prints scores of the trees of runs, and writes trees and figures."""
    command.require(_WORKDIRS)
    command.refuse_overrides(overrides)
    workdirs, names = _WORKDIRS.value, command.run_names(_WORKDIRS)
    folder = _folder()
    from hypjax.analysis.hierarchy import Images
    from hypjax.analysis.hierarchy_of_run import hierarchy_of_run
    from hypjax.analysis.hierarchy_result import as_json, radii_table, scores_table
    from hypjax.analysis.run_embeddings import open_datasets, saved_configs
    from hypjax.runs.tables import noted, print_notes
    from hypjax.system import console
    from hypjax.system.caches import keep_compiled_programs

    keep_compiled_programs()
    configs = saved_configs(workdirs)
    splits = open_datasets(configs)
    first = workdirs[0]
    images = Images.of(configs[first].data.name, splits[first].test, _IMAGES.value, _SEED.value)
    found = []
    for name, workdir in zip(names, workdirs, strict=True):
        console.say(f"embedding the test images with {name}")
        own = hierarchy_of_run(name, workdir, configs[workdir], splits[workdir], images)
        found.append(own.found)
        if folder:
            files = _write(_made(folder / name.strip("/").replace("/", "-")), images, own)
            console.say(f"wrote {', '.join(map(str, files))}")
    print(f"trees of {images.summary}:\n{scores_table(found)}")
    if table := radii_table(found):
        print(f"\n{table}")
    notes = noted(splits[first].notes)
    print_notes(notes)
    if folder:
        numbers = {"images": images.indices.tolist(), "runs": as_json(found), **notes}
        command.write_numbers(folder / "hierarchy.json", numbers)
        console.say(f"wrote {folder / 'hierarchy.json'}")


def _folder() -> pathlib.Path | None:
    return _made(pathlib.Path(_OUTPUT.value).expanduser()) if _OUTPUT.value else None


def _made(folder: pathlib.Path) -> pathlib.Path:
    """Creates a folder unless it exists.

    Raises:
        UserError: It cannot be created.
    """
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot create the folder {folder} ({error.strerror})") from error
    command.require_writable(folder)
    return folder


def _write(folder: pathlib.Path, images: Images, own: Hierarchy) -> list[pathlib.Path]:
    """Writes the tree and the figures of a run, and returns their files.

    Raises:
        UserError: A file cannot be written.
    """
    from hypjax.analysis.hierarchy_figures import draw_affinity, draw_disk
    from hypjax.analysis.hierarchy_result import newick, nodes_json
    from hypjax.system.files import write_text

    names = ("tree.json", "tree.nwk", "affinity.png", "disk.png", "leaves.png")
    files = [folder / name for name in names]
    tree, text, affinity, disk, leaves = files
    command.write_numbers(tree, nodes_json(own.nodes))
    try:
        write_text(text, newick(own.nodes))
        for old in (disk, leaves):  # Not every run has them.
            old.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"cannot write to {text} ({error.strerror})") from error
    draw_affinity(own.affinity, images.groups_of_classes(), affinity)
    if own.disk is not None:
        title, grouping = next(iter((images.further or images.groupings).items()))
        draw_disk(*own.disk, *grouping, title, disk)
    if own.leaves:
        _draw_leaves(images, own, leaves)
    return [file for file in files if file.exists()]


def _draw_leaves(images: Images, own: Hierarchy, output: pathlib.Path) -> None:
    from hypjax.analysis.hit_grid import Picture, draw_rows

    rows = []
    for leaf in own.leaves[:_ROWS]:
        row = []
        for image, beneath in list(zip(leaf.nearest, leaf.beneath, strict=True))[:_COLUMNS]:
            head = "" if row else f"proxy {leaf.proxy}, {leaf.size} images\n"
            title = head + images.dataset.class_name(image)
            row.append(Picture(image, title, "tab:blue" if beneath else "none"))
        rows.append(row)
    draw_rows(rows, output, lambda i: images.dataset.image(i, 3).convert("RGB"))


if __name__ == "__main__":
    command.run(main, FLAGS, EXAMPLE)
