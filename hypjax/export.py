"""Writes a dataset's images as folders: python -m hypjax.export --output=letters."""

import pathlib

from absl import flags

from hypjax import command
from hypjax.errors import UserError

_DATASET = flags.DEFINE_string("dataset", "glyphs", "Name of the dataset.")
_OUTPUT = flags.DEFINE_string("output", None, "Folder to write, with a sub-folder a split.")
_DATA_DIR = flags.DEFINE_string("data_dir", None, "Where datasets lie; TFDS's default otherwise.")


def main(overrides: list[str]) -> None:
    """Writes the images."""
    command.refuse_overrides(overrides)
    if not _OUTPUT.value:
        raise UserError("no folder named; try --output=letters")
    from hypjax.data.preparation.export import export

    count = export(_DATASET.value, pathlib.Path(_OUTPUT.value).expanduser(), _DATA_DIR.value)
    print(f"{count} images are in {_OUTPUT.value}")


if __name__ == "__main__":
    command.run(main)
