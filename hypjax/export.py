"""Writes a dataset's images as folders."""

import pathlib

from hypjax import command

EXAMPLE = "python -m hypjax.export --output=letters"
FLAGS = command.Flags(
    dataset=command.string("Name of the dataset.", "glyphs"),
    output=command.string("Folder to write, with one sub-folder per split."),
    data_dir=command.DATA_DIR,
)


def main() -> None:
    """Writes the images."""
    FLAGS.require("output")
    from hypjax.data.preparation.export import export

    count = export(FLAGS.dataset, pathlib.Path(FLAGS.output).expanduser(), FLAGS.data_dir)
    print(f"wrote {count} images to {FLAGS.output}")


if __name__ == "__main__":
    command.run(main, FLAGS, EXAMPLE)
