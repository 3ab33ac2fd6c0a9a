"""Exports a prepared dataset as folders of image files, to browse or to start a new one from."""

import collections
import io
import itertools
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
    """Writes the original image files to OUTPUT/SPLIT/CLASS/NAME; returns their number.

    Names are the last parts of those in the dataset, after the folders that tell images of a class
    apart, without spaces. Names without a suffix get that of the image's format.
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
            folders = list(map(_valid, records.class_names))
            names = _short_names(folders, records.names)
            bar = {"desc": split, "unit": "image", "disable": None, "leave": False}
            for i in tqdm.trange(len(records.names), **bar):
                with reading(dataset, folder.path):
                    image, name = records.content(i), names[i]
                if pathlib.PurePath(name).suffix.lower() not in Image.registered_extensions():
                    name += f".{Image.open(io.BytesIO(image)).format.lower()}"
                path = unfinished / split / folders[i] / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(image)
            count += len(records.names)
        unfinished.rename(output)
    return count


def _short_names(folders: Sequence[str], names: Sequence[str]) -> list[str]:
    """File names that differ within each folder, also where systems ignore case."""
    parts = [[_valid(part).replace(" ", "_") for part in name.split("/")] for name in names]
    short, rows_of = [""] * len(parts), collections.defaultdict(list)
    for i, folder in enumerate(folders):
        rows_of[folder.lower()].append(i)
    for rows in rows_of.values():
        columns = itertools.zip_longest(*(reversed(parts[i]) for i in rows), fillvalue="")
        last, *folders_above = columns
        telling = [column for column in folders_above if len({*column}) > 1]
        longer = ["_".join(filter(None, row)) for row in zip(*reversed(telling), last, strict=True)]
        numbered = [f"{i}_{name}" for i, name in enumerate(longer)]
        candidates = (list(last), longer, numbered)
        unique = (x for x in candidates if len({name.lower() for name in x}) == len(rows))
        for i, name in zip(rows, next(unique), strict=True):
            short[i] = name
    return short


def _valid(name: str) -> str:
    """Makes a name valid on every file system."""
    return re.sub(r'[\x00-\x1f<>:"/\\|?*]', " ", name).strip(" ").lstrip(".")
