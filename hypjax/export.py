"""Writes a dataset's images as folders."""

import pathlib

from hypjax import command
from hypjax.catalogue import DatasetName
from hypjax.errors import counted


def main(*, dataset: DatasetName = "glyphs", output: str, data_dir: str | None = None) -> None:
    """Writes the images.

    Args:
        dataset: Name of the dataset.
        output: Folder to write, with one sub-folder per split.
        data_dir: Folder of prepared datasets. Default: ~/tensorflow_datasets.

    Example:
        python -m hypjax.export --output=letters
    """
    from hypjax.data.preparation.export import export

    count = export(dataset, pathlib.Path(output).expanduser(), data_dir)
    print(f"wrote {counted(count, 'image')} to {output}")


if __name__ == "__main__":
    command.run(main)
