"""Shows the spectrum of trained runs' embeddings, before and after training (IRT, Analysis)."""

from typing import Annotated

from hypjax import command
from hypjax.fields import at_least


def main(
    *,
    overrides: list[str],
    workdir: list[str],
    output: command.Figure | None = None,
    images: Annotated[int, at_least(3)] = 5000,
    seed: command.Natural = 0,
) -> None:
    """Prints how variance spreads over principal components, and how similar images are.

    Args:
        overrides: Where the images are if they have moved, as data.path=photos.
        workdir: Folder or URL of a trained run; repeat the flag to compare runs of one dataset.
        output: Figure to draw, such as spectrum.png; spectrum.json beside it holds all numbers.
        images: Largest number of test images, from random classes; memory and time grow with its
            square.
        seed: Seed of the random choice of images.

    Example:
        python -m hypjax.spectrum --workdir=runs/glyphs-hyp --output=spectrum.png
    """
    from hypjax.analysis import spectrum
    from hypjax.analysis.run_embeddings import ChosenImages, open_runs
    from hypjax.runs.tables import noted, print_notes

    runs = open_runs(workdir, overrides)
    chosen = ChosenImages.of(runs[0], images, seed)
    spectra = [spectrum.spectrum_of_run(run, chosen.dataset) for run in runs]
    print(f"embeddings of {chosen.summary}:\n{spectrum.table(spectra)}")
    notes = print_notes(noted(runs[0].splits.notes))
    if output:
        spectrum.draw(spectra, output)
        numbers = {"images": chosen.indices.tolist(), "runs": spectra, **notes}
        command.write_numbers(output.with_suffix(".json"), numbers, output)


if __name__ == "__main__":
    command.run(main)
