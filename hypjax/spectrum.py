"""Shows how the embeddings of trained runs spread, before and after training (IRT, Analysis)."""

from hypjax import command

EXAMPLE = "python -m hypjax.spectrum --workdir=runs/glyphs-hyp --output=spectrum.png"
FLAGS = command.Flags()
_WORKDIRS = FLAGS.runs()
_OUTPUT = FLAGS.string(
    "output",
    None,
    "Figure to draw, such as spectrum.png; beside it, spectrum.json holds all numbers.",
)
_IMAGES = FLAGS.integer(
    "images",
    5000,
    "Largest number of test images; of more, random classes are chosen. Time grows with its "
    "square.",
    lower_bound=3,
)
_SEED = FLAGS.integer("seed", 0, "Seed of the choice of images.", lower_bound=0)


def main(overrides: list[str]) -> None:
    """Prints how embeddings spread over principal components, and how similar images are."""
    names = command.run_names(_WORKDIRS)
    command.refuse_overrides(overrides)
    output = command.figure(_OUTPUT)
    from hypjax.analysis import spectrum
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
        found.append(spectrum.spectrum_of_run(run, images.dataset))
    print(f"embeddings of {images.summary}:\n{spectrum.table(found)}")
    notes = noted(runs[0].splits.notes)
    print_notes(notes)
    if output:
        spectrum.draw(found, output)
        numbers = output.with_suffix(".json")
        command.write_numbers(numbers, {"images": images.indices.tolist(), "runs": found, **notes})
        console.say(f"wrote {output}, {numbers}")


if __name__ == "__main__":
    command.run(main, FLAGS, EXAMPLE)
