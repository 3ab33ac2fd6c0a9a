"""Exports a prepared dataset as folders of image files, to browse or to start a new one from."""

import collections
import io
import pathlib
import re
import tempfile
from collections.abc import Sequence

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
    count = 0
    with writing(output), tempfile.TemporaryDirectory(dir=output.absolute().parent) as parent:
        unfinished = pathlib.Path(parent, output.name)
        for split in folder.splits:
            records = open_records(folder, split)
            folders = list(map(_valid, records.class_names))
            names = _file_names(folders, records.names)
            bar = {"desc": split, "unit": "image", "disable": None, "leave": False}
            for i, name in enumerate(tqdm.tqdm(names, **bar)):
                with reading(dataset, folder.path):
                    image = records.content(i)
                if pathlib.PurePath(name).suffix.lower() not in Image.registered_extensions():
                    name += f".{Image.open(io.BytesIO(image)).format.lower()}"
                path = unfinished / split / folders[i] / name
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("xb") as file:
                    file.write(image)
            count += len(names)
        unfinished.rename(output)
    return count


def _file_names(folders: Sequence[str], names: Sequence[str]) -> list[str]:
    """File names without spaces, numbered in folders where two would be equal but for case."""
    names = [_valid(name.split("/")[-1]).replace(" ", "_") for name in names]
    folders = [folder.lower() for folder in folders]
    counts = collections.Counter(zip(folders, map(str.lower, names), strict=True))
    repeated = {folder for (folder, _), count in counts.items() if count > 1}
    rows = enumerate(zip(folders, names, strict=True))
    return [f"{i}_{name}" if folder in repeated else name for i, (folder, name) in rows]


def _valid(name: str) -> str:
    """Makes a name valid on every file system."""
    return re.sub(r'[\x00-\x1f<>:"/\\|?*]', " ", name).strip(" ").lstrip(".")
