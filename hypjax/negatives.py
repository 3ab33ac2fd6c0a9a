"""Shows the hardest negatives of trained runs, and their weights in the loss (HypMix)."""

from hypjax import command


def main(
    *,
    overrides: list[str],
    workdir: list[str],
    anchors: command.Positive = 1000,
    show: command.Natural = 4,
    index: list[int] | None = None,
    k: command.Positive = 10,
    output: command.Figure | None = None,
) -> None:
    """Prints the distribution of weights over negatives, and the hardest negatives of anchors.

    Args:
        overrides: Where the images are if they have moved, as data.path=photos.
        workdir: Folder or URL of a trained run; repeat the flag to compare runs of one dataset.
        anchors: Without --index: number of anchors, evenly spaced among the images.
        show: Without --index: number of anchors whose negatives are shown.
        index: Index of an anchor, from 0, instead of --anchors and --show; repeat the flag.
        k: Number of negatives to show for each anchor.
        output: Figure of the weights to draw, such as negatives.png. Beside it,
            negatives-hardest.png shows the hardest negatives, and negatives.json holds all numbers.

    Example:
        python -m hypjax.negatives --workdir=runs/glyphs-hyp --output=negatives.png
    """
    from hypjax.analysis import negatives
    from hypjax.analysis.run_embeddings import open_runs
    from hypjax.objectives import softmax_temperature
    from hypjax.runs.tables import noted, print_notes

    runs = open_runs(workdir, overrides)
    for run in runs:  # Refuses losses without a temperature before it embeds images.
        softmax_temperature(run.method.objective_fields)
    splits = runs[0].splits
    choice = negatives.choose(splits, index or [], anchors, show, k)
    weights = [negatives.weigh_run(run, choice) for run in runs]
    print(f"weights of the negatives of {len(choice.anchors)} anchors:")
    print(negatives.summary_table(weights))
    for anchor in range(choice.num_listed):
        print(f"\n{negatives.anchor_table(weights, anchor)}")
    notes = print_notes(noted(splits.notes))
    if output:
        negatives.draw_curves(weights, output)
        hardest = output.with_stem(f"{output.stem}-hardest")
        figures = [output, *negatives.draw_hardest(weights, splits, hardest)]
        numbers = {"anchors": choice.anchors.tolist(), "runs": weights, **notes}
        command.write_numbers(output.with_suffix(".json"), numbers, *figures)


if __name__ == "__main__":
    command.run(main)
