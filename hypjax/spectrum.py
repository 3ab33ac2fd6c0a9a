"""Shows how the embeddings of trained runs spread, before and after training (IRT, Analysis)."""

from hypjax import command

EXAMPLE = "python -m hypjax.spectrum --workdir=runs/glyphs-hyp --output=spectrum.png"
FLAGS = command.Flags(
    workdir=command.RUNS,
    output=command.string(
        "Figure to draw, such as spectrum.png; beside it, spectrum.json holds all numbers."
    ),
    **command.CHOSEN,
)


def main() -> None:
    """Prints how embeddings spread over principal components, and how similar images are."""
    FLAGS.require("workdir")
    output = FLAGS.output_file("output", *command.FIGURES)
    from hypjax.analysis import spectrum
    from hypjax.analysis.run_embeddings import ChosenImages, open_runs
    from hypjax.runs.tables import noted, print_notes

    runs = open_runs(FLAGS.workdir)
    images = ChosenImages.of(runs[0], FLAGS.images, FLAGS.seed)
    found = [spectrum.spectrum_of_run(run, images.dataset) for run in runs]
    print(f"embeddings of {images.summary}:\n{spectrum.table(found)}")
    print_notes(notes := noted(runs[0].splits.notes))
    if output:
        spectrum.draw(found, output)
        numbers = {"images": images.indices.tolist(), "runs": found, **notes}
        command.write_numbers(output.with_suffix(".json"), numbers, output)


if __name__ == "__main__":
    command.run(main, FLAGS, EXAMPLE)
