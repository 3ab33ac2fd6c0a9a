"""Shows how the embeddings of trained runs spread, before and after training (IRT, Analysis)."""

from absl import flags

from hypjax import command

EXAMPLE = "python -m hypjax.spectrum --workdir=runs/glyphs-hyp --output=spectrum.png"
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
    "Figure to draw, such as spectrum.png; beside it, spectrum.json holds all numbers.",
    flag_values=FLAGS,
)
_IMAGES = flags.DEFINE_integer(
    "images",
    5000,
    "Largest number of test images; of more, random classes are chosen. Time grows with its "
    "square.",
    lower_bound=3,
    flag_values=FLAGS,
)
_SEED = flags.DEFINE_integer(
    "seed", 0, "Seed of the choice of images.", lower_bound=0, flag_values=FLAGS
)


def main(overrides: list[str]) -> None:
    """Prints how embeddings spread over principal components, and how similar images are."""
    command.require(_WORKDIRS)
    command.refuse_overrides(overrides)
    workdirs, names = _WORKDIRS.value, command.run_names(_WORKDIRS)
    output = command.figure(_OUTPUT)
    from hypjax.analysis.hierarchy import Images
    from hypjax.analysis.run_embeddings import open_datasets, saved_configs
    from hypjax.analysis.spectrum_of_run import spread_of_run
    from hypjax.analysis.spectrum_result import as_json, draw, table
    from hypjax.runs.tables import noted, print_notes
    from hypjax.system import console
    from hypjax.system.caches import keep_compiled_programs

    keep_compiled_programs()
    configs = saved_configs(workdirs)
    splits = open_datasets(configs)
    first = workdirs[0]
    images = Images.of(configs[first].data.name, splits[first].test, _IMAGES.value, _SEED.value)
    runs = []
    for name, workdir in zip(names, workdirs, strict=True):
        console.say(f"embedding the test images with {name}")
        own = configs[workdir], splits[workdir], images.dataset
        runs.append(spread_of_run(name, workdir, *own))
    print(f"embeddings of {images.summary}:\n{table(runs)}")
    notes = noted(splits[first].notes)
    print_notes(notes)
    if output:
        draw(runs, output)
        numbers = output.with_suffix(".json")
        found = {"images": images.indices.tolist(), "runs": as_json(runs), **notes}
        command.write_numbers(numbers, found)
        console.say(f"wrote {output}, {numbers}")


if __name__ == "__main__":
    command.run(main, FLAGS, EXAMPLE)
