"""Exports a prepared dataset as folders of image files, to browse, or to start a new dataset."""

import collections
import io
import pathlib
import re
import tempfile
from collections.abc import Sequence

from PIL import Image

from hypjax.data.preparation.prepare import notes, prepared_folder
from hypjax.data.records import open_records, reading
from hypjax.errors import UserError, writing
from hypjax.system import console
from hypjax.system.progress import Bar


def export(dataset: str, output: pathlib.Path, data_dir: str | None = None) -> int:
    """Writes the original image files to OUTPUT/SPLIT/CLASS/NAME; returns their number."""
    if output.exists():
        raise UserError(f"{output} already exists; choose another folder, or remove it")
    folder = prepared_folder(dataset, data_dir)
    for note in notes(folder):
        console.warn(f"this is {note}; results of the exported images will not say so")
    tables = {split: open_records(folder, split) for split in folder.splits}
    classes = sorted({name for images in tables.values() for name in images.class_names})
    class_folders = _distinct([*map(_valid, classes)], [""] * len(classes))
    folder_of = dict(zip(classes, class_folders, strict=True))
    with writing(output), tempfile.TemporaryDirectory(dir=output.absolute().parent) as parent:
        unfinished = pathlib.Path(parent, output.name)
        for split, images in tables.items():
            folders = [folder_of[name] for name in images.class_names]
            names = [_valid(name.split("/")[-1]).replace(" ", "_") for name in images.names]
            names = _distinct(names, folders)
            for i, name in enumerate(Bar(names, split, unit="image", disable=None, leave=False)):
                with reading(dataset, folder.path):
                    content = images.content(i)
                if name == _stem(name):
                    name += f".{str(Image.open(io.BytesIO(content)).format).lower()}"
                path = unfinished / split / folders[i] / name
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("xb") as file:
                    file.write(content)
        unfinished.rename(output)
    return sum(map(len, tables.values()))


def _distinct(names: Sequence[str], folders: Sequence[str]) -> list[str]:
    """Numbers all names in a folder if one is empty, or two are equal up to case and suffix."""
    stems = ((folder, _stem(name).lower()) for folder, name in zip(folders, names, strict=True))
    counts = collections.Counter(stems)
    numbered = {folder for (folder, stem), count in counts.items() if count > 1 or not stem}
    rows = enumerate(zip(names, folders, strict=True))
    return [f"{i}_{name}" if folder in numbered else name for i, (name, folder) in rows]


def _valid(name: str) -> str:
    """Replaces characters that some systems reject in file names."""
    return re.sub(r'[\x00-\x1f<>:"/\\|?*]', " ", name).strip(" ").lstrip(".")


def _stem(name: str) -> str:
    """Removes the suffix of an image format from a file's name."""
    path = pathlib.PurePath(name)
    return path.stem if path.suffix.lower() in Image.registered_extensions() else name
