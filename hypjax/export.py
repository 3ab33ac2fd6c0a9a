"""Writes a dataset's images as folders."""

import pathlib

from hypjax import command
from hypjax.errors import UserError

EXAMPLE = "python -m hypjax.export --output=letters"
FLAGS = command.Flags()
_DATASET = FLAGS.string("dataset", "Name of the dataset.", "glyphs")
_OUTPUT = FLAGS.string("output", "Folder to write, with one sub-folder per split.")
_DATA_DIR = FLAGS.string("data_dir", "Folder of prepared datasets. Default: that of TFDS.")


def main() -> None:
    """Writes the images."""
    if not _OUTPUT.value:
        raise UserError("--output is missing; try --output=letters")
    from hypjax.data.preparation.export import export

    count = export(_DATASET.value, pathlib.Path(_OUTPUT.value).expanduser(), _DATA_DIR.value)
    print(f"wrote {count} images to {_OUTPUT.value}")


if __name__ == "__main__":
    command.run(main, FLAGS, EXAMPLE)
