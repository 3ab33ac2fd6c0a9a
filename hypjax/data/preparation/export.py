"""Exports a prepared dataset as folders of image files, to browse, or to start a new dataset."""

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
        parts = {split: open_records(folder, split) for split in folder.splits}
        classes = sorted({name for records in parts.values() for name in records.class_names})
        class_folders = _distinct([*map(_valid, classes)], [""] * len(classes))
        folder_of = dict(zip(classes, class_folders, strict=True))
        for split, records in parts.items():
            folders = [folder_of[name] for name in records.class_names]
            names = [_valid(name.split("/")[-1]).replace(" ", "_") for name in records.names]
            names = _distinct(names, folders)
            bar = {"desc": split, "unit": "image", "disable": None, "leave": False}
            for i, name in enumerate(tqdm.tqdm(names, **bar)):
                with reading(dataset, folder.path):
                    image = records.content(i)
                if name == _stem(name):
                    name += f".{Image.open(io.BytesIO(image)).format.lower()}"
                path = unfinished / split / folders[i] / name
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("xb") as file:
                    file.write(image)
            count += len(names)
        unfinished.rename(output)
    return count


def _distinct(names: Sequence[str], folders: Sequence[str]) -> list[str]:
    """Numbers the names in folders with empty names, or names equal up to case and suffix."""
    stems = ((folder, _stem(name).lower()) for folder, name in zip(folders, names, strict=True))
    counts = collections.Counter(stems)
    numbered = {folder for (folder, stem), count in counts.items() if count > 1 or not stem}
    rows = enumerate(zip(names, folders, strict=True))
    return [f"{i}_{name}" if folder in numbered else name for i, (name, folder) in rows]


def _valid(name: str) -> str:
    """Replaces characters that some systems reject in file names."""
    return re.sub(r'[\x00-\x1f<>:"/\\|?*]', " ", name).strip(" ").lstrip(".")


def _stem(name: str) -> str:
    """Removes the suffix of an image format from a name."""
    path = pathlib.PurePath(name)
    return path.stem if path.suffix.lower() in Image.registered_extensions() else name
