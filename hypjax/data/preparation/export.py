"""Writes a prepared dataset's images as folders, to look at or to begin own ones from."""

import io
import itertools
import pathlib
import re
import tempfile
from collections.abc import Iterable

import tensorflow_datasets as tfds
import tqdm
from PIL import Image

from hypjax.data.preparation.prepare import count, open_builder, partial
from hypjax.data.records import open_records
from hypjax.errors import UserError
from hypjax.system import console

# Some cameras put a preview behind the picture, which makes no other file of it.
_ORDINARY_FORMATS = {"MPO": "JPEG"}
_SUFFIXES = {"JPEG": ".jpg", "TIFF": ".tif"}
_LONGEST = 200  # Bytes of a name; file systems allow 255.


def export(dataset: str, output: pathlib.Path, data_dir: str | None = None) -> int:
    """Writes the images to OUTPUT/SPLIT/CLASS/NAME, their files as they are.

    Names end as the images' formats say; glyphs is prepared first if need be.

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
    if note := partial(dataset, count(builder)):
        console.warn(f"this is {note}; results from the exported images cannot tell")
    try:
        with tempfile.TemporaryDirectory(dir=output.absolute().parent) as folder:
            unfinished = pathlib.Path(folder, output.name)
            images = sum(_export_split(builder, split, unfinished) for split in builder.info.splits)
            unfinished.rename(output)
    except OSError as error:
        raise UserError(f"cannot write to {output} ({error.strerror})") from error
    return images


def _export_split(builder: tfds.core.DatasetBuilder, split: str, output: pathlib.Path) -> int:
    records = open_records(builder, split)
    folders = _file_names(records.class_names)
    names = _file_names(records.names)
    for i in tqdm.trange(len(names), desc=split, unit="image", disable=None, leave=False):
        image = records.images[i]["image"]
        folder = output / split / folders[records.class_names[i]]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / _with_suffix(names[records.names[i]], image)).write_bytes(image)
    return len(names)


def _file_names(names: Iterable[str]) -> dict[str, str]:
    """Makes names such that every file system takes them, and keeps them distinct."""
    safe, taken = {}, set()
    for name in dict.fromkeys(names):
        plain = re.sub(r'[\x00-\x1f<>:"/\\|?*]', " ", name).strip(" ").lstrip(".")
        short = plain.encode()[-_LONGEST:].decode(errors="ignore") or "_"
        candidates = itertools.chain([short], (f"{n} {short}" for n in itertools.count(2)))
        safe[name] = next(c for c in candidates if c.casefold() not in taken)
        taken.add(safe[name].casefold())
    return safe


def _with_suffix(name: str, image: bytes) -> str:
    """A file's name with the ending that its contents ask for, added where it has another."""
    found = Image.open(io.BytesIO(image)).format
    kind = _ORDINARY_FORMATS.get(found, found)
    claimed = Image.registered_extensions().get(pathlib.PurePath(name).suffix.lower())
    return name if claimed == kind else name + _SUFFIXES.get(kind, f".{kind.lower()}")
