"""Exports a prepared dataset as folders of image files, to browse or to start a new one from."""

import io
import itertools
import pathlib
import re
import tempfile
from collections.abc import Iterable

import tensorflow_datasets as tfds
import tqdm
from PIL import Image

from hypjax.data.preparation.prepare import notes, open_builder
from hypjax.data.records import open_records
from hypjax.errors import UserError, writing
from hypjax.system import console

# JPEG files with an embedded preview, as some cameras write, are still JPEG.
_ORDINARY_FORMATS = {"MPO": "JPEG"}
_SUFFIXES = {"JPEG": ".jpg", "TIFF": ".tif"}
_MAX_BYTES = 200  # Of a file name; file systems allow 255.


def export(dataset: str, output: pathlib.Path, data_dir: str | None = None) -> int:
    """Writes the original image files to OUTPUT/SPLIT/CLASS/NAME; returns their number.

    Names get the suffix of the image's format. The dataset is opened as by `open_builder`. Raises
    UserError if the folder exists or cannot be written, or there is no such dataset.
    """
    if output.exists():
        raise UserError(f"{output} already exists; choose another folder, or remove it")
    builder = open_builder(dataset, data_dir)
    for note in notes(builder):
        console.warn(f"this is {note}; results of the exported images will not say so")
    with writing(output), tempfile.TemporaryDirectory(dir=output.absolute().parent) as folder:
        unfinished = pathlib.Path(folder, output.name)
        images = sum(_export_split(builder, split, unfinished) for split in builder.info.splits)
        unfinished.rename(output)
    return images


def _export_split(builder: tfds.core.DatasetBuilder, split: str, output: pathlib.Path) -> int:
    records = open_records(builder, split)
    folders = _file_names(records.class_names)
    names = _file_names(records.names)
    for i in tqdm.trange(len(names), desc=split, unit="image", disable=None, leave=False):
        image = records.records[i]["image"]
        folder = output / split / folders[records.class_names[i]]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / _with_suffix(names[records.names[i]], image)).write_bytes(image)
    return len(names)


def _file_names(names: Iterable[str]) -> dict[str, str]:
    """Maps names to distinct ones that are valid on every file system."""
    safe, taken = {}, set()
    for name in dict.fromkeys(names):
        plain = re.sub(r'[\x00-\x1f<>:"/\\|?*]', " ", name).strip(" ").lstrip(".")
        short = plain.encode()[-_MAX_BYTES:].decode(errors="ignore") or "_"
        candidates = itertools.chain([short], (f"{n} {short}" for n in itertools.count(2)))
        safe[name] = next(c for c in candidates if c.casefold() not in taken)
        taken.add(safe[name].casefold())
    return safe


def _with_suffix(name: str, image: bytes) -> str:
    """Appends the suffix of the image's format, unless the name already has it."""
    found = Image.open(io.BytesIO(image)).format
    kind = _ORDINARY_FORMATS.get(found, found)
    claimed = Image.registered_extensions().get(pathlib.PurePath(name).suffix.lower())
    return name if claimed == kind else name + _SUFFIXES.get(kind, f".{kind.lower()}")
