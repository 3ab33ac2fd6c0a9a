"""Shows the hardest negatives of trained runs, and their weights in the loss (HypMix)."""

from hypjax import command

EXAMPLE = "python -m hypjax.negatives --workdir=runs/glyphs-hyp --output=negatives.png"
FLAGS = command.Flags()
_WORKDIRS = FLAGS.runs()
_ANCHORS = FLAGS.integer(
    "anchors", 1000, "Number of anchors, at equal distances among the test images.", lower_bound=1
)
_SHOW = FLAGS.integer("show", 4, "Number of anchors whose negatives are shown.", lower_bound=0)
_INDICES = FLAGS.integers(
    "index",
    [],
    "Index of a test image as an anchor, from 0, instead of --anchors and --show; repeat the flag.",
)
_K = FLAGS.integer("k", 10, "Number of negatives to show for each anchor.", lower_bound=1)
_OUTPUT = FLAGS.string(
    "output",
    None,
    "Figure of the weights to draw, such as negatives.png. Beside it, negatives-hardest.png shows "
    "the hardest negatives, and negatives.json holds all numbers.",
)


def main(overrides: list[str]) -> None:
    """Prints how weights are distributed over negatives, and the hardest negatives of anchors."""
    names = command.run_names(_WORKDIRS)
    command.refuse_overrides(overrides)
    output = command.figure(_OUTPUT)
    from hypjax.analysis import negatives
    from hypjax.analysis.run_embeddings import open_runs
    from hypjax.objectives import softmax_temperature
    from hypjax.runs.tables import noted, print_notes
    from hypjax.system import console
    from hypjax.system.caches import keep_compiled_programs

    keep_compiled_programs()
    runs = open_runs(names)
    for run in runs:  # Before any image is embedded.
        softmax_temperature(run.config)
    splits = runs[0].splits
    choice = negatives.choose(splits, _INDICES.value, _ANCHORS.value, _SHOW.value, _K.value)
    found = []
    for run in runs:
        console.say(f"embedding the test images with the model of {run.name}")
        found.append(negatives.weigh_run(run, choice))
    print(f"weights of the negatives of {len(choice.anchors)} anchors:")
    print(negatives.summary_table(found))
    for place in range(choice.shown):
        print(f"\n{negatives.anchor_table(found, place)}")
    notes = noted(splits.notes)
    print_notes(notes)
    if output:
        negatives.draw_curves(found, output)
        hardest = output.with_stem(f"{output.stem}-hardest")
        files = [output, *negatives.draw_hardest(found, splits, hardest)]
        of_runs = [each.numbers for each in found]
        numbers = output.with_suffix(".json")
        command.write_numbers(
            numbers, {"anchors": choice.anchors.tolist(), "runs": of_runs, **notes}
        )
        console.say(f"wrote {', '.join(map(str, [*files, numbers]))}")


if __name__ == "__main__":
    command.run(main, FLAGS, EXAMPLE)
