"""Writes a prepared dataset's images as folders, to look at or to begin own ones from."""

import pathlib
import tempfile

import tensorflow_datasets as tfds
import tqdm

from hypjax.data.dataset import open_builder
from hypjax.errors import UserError


def export(dataset: str, output: pathlib.Path, data_dir: str | None = None) -> int:
    """Writes the images to OUTPUT/SPLIT/CLASS/NAME.png, and prepares the dataset if need be.

    Args:
        dataset: Its name.
        output: A folder that does not exist yet.
        data_dir: Where datasets lie; None: TFDS's default.

    Returns:
        Number of images.

    Raises:
        UserError: The folder exists or cannot be written, or there is no such dataset.
    """
    if output.exists():
        raise UserError(f"{output} exists already; name another folder, or remove it")
    builder = open_builder(dataset, data_dir)
    try:
        with tempfile.TemporaryDirectory(dir=output.absolute().parent) as folder:
            unfinished = pathlib.Path(folder, output.name)
            count = sum(_export_split(builder, split, unfinished) for split in ("train", "test"))
            unfinished.rename(output)
    except OSError as error:
        raise UserError(f"cannot write to {output} ({error.strerror})") from error
    return count


def _export_split(builder: tfds.core.DatasetBuilder, split: str, output: pathlib.Path) -> int:
    records = builder.as_data_source(split, decoders={"image": tfds.decode.SkipDecoding()})
    class_name = builder.info.features["label"].int2str
    for record in tqdm.tqdm(records, split, unit="image", disable=None, leave=False):
        folder = output / split / _file_name(class_name(record["label"]))
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{_file_name(record['name'].decode())}.png").write_bytes(record["image"])
    return len(records)


def _file_name(text: str) -> str:
    return text.replace("/", " ")
