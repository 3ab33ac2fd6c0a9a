"""Shows the hardest negatives of trained runs, and their weights in the loss (HypMix)."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from absl import flags

from hypjax import command

if TYPE_CHECKING:  # They import JAX or NumPy.
    from hypjax.analysis.negatives_result import Anchor, Weighed
    from hypjax.data.parts import Splits

EXAMPLE = "python -m hypjax.negatives --workdir=runs/glyphs-hyp --output=negatives.png"
FLAGS = flags.FlagValues()
_WORKDIRS = flags.DEFINE_multi_string(
    "workdir",
    [],
    "Folder of a trained run, or its URL; repeat the flag to compare runs of one dataset.",
    flag_values=FLAGS,
)
_ANCHORS = flags.DEFINE_integer(
    "anchors",
    1000,
    "Number of anchors, at equal distances among the test images.",
    lower_bound=1,
    flag_values=FLAGS,
)
_SHOW = flags.DEFINE_integer(
    "show", 4, "Number of anchors whose negatives are shown.", lower_bound=0, flag_values=FLAGS
)
_INDICES = flags.DEFINE_multi_integer(
    "index",
    [],
    "Index of a test image as an anchor, from 0, instead of --anchors and --show; repeat the flag.",
    flag_values=FLAGS,
)
_K = flags.DEFINE_integer(
    "k", 10, "Number of negatives to show for each anchor.", lower_bound=1, flag_values=FLAGS
)
_OUTPUT = flags.DEFINE_string(
    "output",
    None,
    "Figure of the weights to draw, such as negatives.png. Beside it, negatives-hardest.png shows "
    "the hardest negatives, and negatives.json holds all numbers.",
    flag_values=FLAGS,
)


def main(overrides: list[str]) -> None:
    """Prints how weights are distributed over negatives, and the hardest negatives of anchors."""
    command.require(_WORKDIRS)
    command.refuse_overrides(overrides)
    workdirs, names = _WORKDIRS.value, command.run_names(_WORKDIRS)
    output = command.figure(_OUTPUT)
    from hypjax.analysis.negatives import Choice, open_runs, weigh_run
    from hypjax.analysis.negatives_result import Anchor, anchor_table, as_json, summary_table
    from hypjax.runs.tables import noted, print_notes
    from hypjax.system import console
    from hypjax.system.caches import keep_compiled_programs

    keep_compiled_programs()
    configs, splits = open_runs(workdirs)
    images = splits[workdirs[0]]
    choice = Choice.of(images, _INDICES.value, _ANCHORS.value, _SHOW.value, _K.value)
    runs = []
    for name, workdir in zip(names, workdirs, strict=True):
        console.say(f"embedding the test images with {name}")
        runs.append(weigh_run(name, workdir, configs[workdir], splits[workdir], choice))
    shown = choice.anchors[: choice.shown].tolist()
    anchors = [Anchor(i, images.test.name(i), images.test.class_name(i)) for i in shown]
    print(f"weights of the negatives of {len(choice.anchors)} anchors:")
    print(summary_table(runs))
    for place, anchor in enumerate(anchors):
        print(f"\n{anchor_table(anchor, runs, place)}")
    notes = noted(images.notes)
    print_notes(notes)
    if output:
        found = {"anchors": choice.anchors.tolist(), "runs": as_json(anchors, runs), **notes}
        _write(output, images, anchors, runs, found)


def _write(
    output: pathlib.Path,
    images: Splits,
    anchors: Sequence[Anchor],
    runs: Sequence[Weighed],
    found: Mapping[str, Any],
) -> None:
    """Writes the figures and the numbers.

    Raises:
        UserError: A file cannot be written.
    """
    from hypjax.analysis.negative_figures import draw_curves, draw_hardest
    from hypjax.system import console

    searched, files = images.gallery or images.test, [output]
    draw_curves(runs, output)
    if anchors:
        read = [
            lambda i, part=part: part.image(i, 3).convert("RGB") for part in (images.test, searched)
        ]
        files += draw_hardest(anchors, runs, output.with_stem(f"{output.stem}-hardest"), *read)
    numbers = output.with_suffix(".json")
    command.write_numbers(numbers, found)
    console.say(f"wrote {', '.join(map(str, [*files, numbers]))}")


if __name__ == "__main__":
    command.run(main, FLAGS, EXAMPLE)
