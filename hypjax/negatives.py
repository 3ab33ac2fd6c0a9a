"""Shows the hardest negatives of trained runs, and their weights in the loss (HypMix)."""

from hypjax import command

EXAMPLE = "python -m hypjax.negatives --workdir=runs/glyphs-hyp --output=negatives.png"
FLAGS = command.Flags(
    workdir=command.RUNS,
    anchors=command.positive("Number of anchors, at equal distances among the test images.", 1000),
    show=command.natural("Number of anchors whose negatives are shown.", 4),
    index=command.integers(
        "Index of a test image as an anchor, from 0, instead of --anchors and --show; repeat the "
        "flag."
    ),
    k=command.positive("Number of negatives to show for each anchor.", 10),
    output=command.string(
        "Figure of the weights to draw, such as negatives.png. Beside it, negatives-hardest.png "
        "shows the hardest negatives, and negatives.json holds all numbers."
    ),
)


def main() -> None:
    """Prints how weights are distributed over negatives, and the hardest negatives of anchors."""
    FLAGS.require("workdir")
    output = FLAGS.output_file("output", *command.FIGURES)
    from hypjax.analysis import negatives
    from hypjax.analysis.run_embeddings import open_runs
    from hypjax.objectives import softmax_temperature
    from hypjax.runs.tables import noted, print_notes

    runs = open_runs(FLAGS.workdir)
    for run in runs:  # Before any image is embedded.
        softmax_temperature(run.config)
    splits = runs[0].splits
    choice = negatives.choose(splits, FLAGS.index, FLAGS.anchors, FLAGS.show, FLAGS.k)
    found = [negatives.weigh_run(run, choice) for run in runs]
    print(f"weights of the negatives of {len(choice.anchors)} anchors:")
    print(negatives.summary_table(found))
    for place in range(choice.shown):
        print(f"\n{negatives.anchor_table(found, place)}")
    print_notes(notes := noted(splits.notes))
    if output:
        negatives.draw_curves(found, output)
        hardest = output.with_stem(f"{output.stem}-hardest")
        figures = [output, *negatives.draw_hardest(found, splits, hardest)]
        numbers = {"anchors": choice.anchors.tolist(), "runs": found, **notes}
        command.write_numbers(output.with_suffix(".json"), numbers, *figures)


if __name__ == "__main__":
    command.run(main, FLAGS, EXAMPLE)
