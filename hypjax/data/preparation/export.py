"""Exports a prepared dataset as folders of image files, to browse or to start a new one from."""

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
    """Writes the original image files to OUTPUT/SPLIT/CLASS/NAME; returns their number.

    Names without a suffix get that of the image's format.
    """
    if output.exists():
        raise UserError(f"{output} already exists; choose another folder, or remove it")
    folder = prepared_folder(dataset, data_dir)
    for note in notes(folder):
        console.warn(f"this is {note}; results of the exported images will not say so")
    count = 0
    with writing(output), tempfile.TemporaryDirectory(dir=output.absolute().parent) as parent:
        unfinished = pathlib.Path(parent, output.name)
        for split in folder.splits:
            records = open_records(folder, split)
            bar = {"desc": split, "unit": "image", "disable": None, "leave": False}
            for i in tqdm.trange(len(records.names), **bar):
                with reading(dataset, folder.path):
                    image, name = records.content(i), _valid(records.names[i])
                if pathlib.PurePath(name).suffix.lower() not in Image.registered_extensions():
                    name += f".{Image.open(io.BytesIO(image)).format.lower()}"
                path = unfinished / split / _valid(records.class_names[i]) / name
                path.parent.mkdir(parents=True, exist_ok=True)
                if path.exists():
                    raise UserError(
                        f"two images would be {path.relative_to(unfinished)}; export none"
                    )
                path.write_bytes(image)
            count += len(records.names)
        unfinished.rename(output)
    return count


def _valid(name: str) -> str:
    """Makes a name valid on every file system."""
    return re.sub(r'[\x00-\x1f<>:"/\\|?*]', " ", name).strip(" ").lstrip(".")
