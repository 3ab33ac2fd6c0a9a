"""Writes a dataset's images as folders."""

import pathlib

from hypjax import command
from hypjax.errors import UserError

EXAMPLE = "python -m hypjax.export --output=letters"
FLAGS = command.Flags(
    dataset=command.string("Name of the dataset.", "glyphs"),
    output=command.string("Folder to write, with one sub-folder per split."),
    data_dir=command.string("Folder of prepared datasets. Default: ~/tensorflow_datasets."),
)


def main() -> None:
    """Writes the images."""
    if not FLAGS.output:
        raise UserError("--output is missing; try --output=letters")
    from hypjax.data.preparation.export import export

    count = export(FLAGS.dataset, pathlib.Path(FLAGS.output).expanduser(), FLAGS.data_dir)
    print(f"wrote {count} images to {FLAGS.output}")


if __name__ == "__main__":
    command.run(main, FLAGS, EXAMPLE)
