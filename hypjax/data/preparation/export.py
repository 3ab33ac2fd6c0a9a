"""Exports a prepared dataset as folders of image files, to browse, or to start a new dataset."""

import io
import pathlib
import re
import tempfile

import tqdm
from PIL import Image

from hypjax.data.preparation.prepare import notes, prepared_folder
from hypjax.data.records import open_records, reading
from hypjax.errors import UserError, writing
from hypjax.system import console


def export(dataset: str, output: pathlib.Path, data_dir: str | None = None) -> int:
    """Writes the original image files to OUTPUT/SPLIT/CLASS/NAME; returns their number."""
    if output.exists():
        raise UserError(f"{output} already exists; choose another folder, or remove it")
    folder = prepared_folder(dataset, data_dir)
    for note in notes(folder):
        console.warn(f"this is {note}; results of the exported images will not say so")
    count, suffixes = 0, Image.registered_extensions()
    with writing(output), tempfile.TemporaryDirectory(dir=output.absolute().parent) as parent:
        unfinished = pathlib.Path(parent, output.name)
        for split in folder.splits:
            records = open_records(folder, split)
            bar = {"desc": split, "unit": "image", "disable": None, "leave": False}
            for i, path_in_dataset in enumerate(tqdm.tqdm(records.names, **bar)):
                with reading(dataset, folder.path):
                    image = records.content(i)
                name = _valid(path_in_dataset.split("/")[-1]).replace(" ", "_")
                if pathlib.PurePath(name).suffix.lower() not in suffixes:
                    name += f".{Image.open(io.BytesIO(image)).format.lower()}"
                path = unfinished / split / _valid(records.class_name(i)) / name
                path.parent.mkdir(parents=True, exist_ok=True)
                if path.exists():
                    path = path.with_name(f"{i}_{name}")
                path.write_bytes(image)
            count += len(records)
        unfinished.rename(output)
    return count


def _valid(name: str) -> str:
    """Replaces characters that some systems reject in file names."""
    return re.sub(r'[\x00-\x1f<>:"/\\|?*]', " ", name).strip(" ").lstrip(".")
