"""Own images: a folder of classes or a table, checked once and split by class."""

import concurrent.futures
import contextlib
import csv
import glob
import hashlib
import os
import pathlib
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tqdm
from jaxtyping import Int
from ml_collections import ConfigDict

from hypjax.data import pixels
from hypjax.data.dataset import Dataset, Splits, check_classes, fill_cache, hold_out, with_cache
from hypjax.errors import UserError
from hypjax.system import console
from hypjax.system.caches import cache_folder
from hypjax.system.cores import usable_cores

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff"})
SPLITS = ("train", "validation", "test", "query", "gallery")
_NAMED = 5  # Most files that a message names.


class Photo(NamedTuple):
    """One image of the user's.

    Attributes:
        path: Of the file.
        label: Name of its class.
        split: One of `SPLITS`; None where classes are yet to be split.
        superlabel: Name of the group its class belongs to, if there are groups.
    """

    path: pathlib.Path
    label: str
    split: str | None = None
    superlabel: str | None = None


class Files(Sequence):
    """Image files as records, read when they are asked for."""

    def __init__(self, paths: Sequence[pathlib.Path]) -> None:
        """Takes the files, in the records' order."""
        self._paths = [str(path) for path in paths]

    def __len__(self) -> int:
        """Number of files."""
        return len(self._paths)

    def __getitem__(self, i: int) -> Mapping[str, Any]:
        """The i-th file's bytes."""
        return {"image": pathlib.Path(self._paths[i]).read_bytes()}


def open_photos(config: ConfigDict) -> Splits:
    """Opens the images at `config.data.path`.

    They come from a folder with one sub-folder a class, from one with `train` and `test` that hold
    such folders, or from a table, see `list_folder` and `read_table`. Every image is decoded once
    to see that it can be; the outcome is kept in the cache folder until a file changes.

    Args:
        config: The run's whole configuration.

    Raises:
        UserError: There is no such folder or table, an image cannot be read, or the classes do not
            suffice for training or for retrieval.
    """
    path = pathlib.Path(config.data.path).expanduser()
    if path.is_dir():
        photos = list_folder(path)
    elif path.suffix.lower() in (".csv", ".parquet"):
        photos = read_table(path)
    else:
        raise UserError(f"config.data.path is {path}: no folder, and no .csv or .parquet table")
    return _split(config, path, photos, _measured(photos))


def list_folder(root: pathlib.Path) -> list[Photo]:
    """Images of a folder: its sub-folders are classes, or splits whose sub-folders are classes.

    They are splits where `train` is among them and has sub-folders itself; each is then called by a
    name of `SPLITS`. Files at any depth below a class belong to it. Hidden files, and files that
    are no images by their name, are passed over.

    Raises:
        UserError: There are no sub-folders, or no images in them.
    """
    folders = _subfolders(root)
    if not folders:
        raise UserError(f"{root} has no sub-folders; put the images of each class into one")
    names = {folder.name for folder in folders}
    if "train" in names and _subfolders(root / "train"):
        if others := names - set(SPLITS):
            raise UserError(
                f"{root} has {', '.join(sorted(others))} beside train, which holds classes; "
                f"splits are called {', '.join(SPLITS)}"
            )
        classes = [(folder, split.name) for split in folders for folder in _subfolders(split)]
    else:
        classes = [(folder, None) for folder in folders]
    photos = [
        Photo(path, folder.name, split) for folder, split in classes for path in _images(folder)
    ]
    if not photos:
        raise UserError(f"no images in the sub-folders of {root} ({', '.join(sorted(SUFFIXES))})")
    return photos


def find_photos(where: str) -> list[Photo]:
    """Images to embed, whose classes need not be known.

    Args:
        where: A folder, at any depth below which they lie (its sub-folders are classes, if there
            are any, as `list_folder` tells); a .csv or .parquet table as in `read_table`; a .txt
            file with a path a line, relative to its folder; a pattern such as 'photos/*.jpg'; or
            one image.

    Returns:
        The images by absolute paths, each once, with '' as label where the class is not known.

    Raises:
        UserError: There are none.
    """
    path = pathlib.Path(where).expanduser()
    if path.is_dir():
        photos = _below(path)
    elif path.suffix.lower() in (".csv", ".parquet"):
        photos = read_table(path)
    elif path.suffix.lower() == ".txt":
        photos = [Photo(path.parent / line, "") for line in _lines(path)]
    elif path.is_file():
        photos = [Photo(path, "")]
    else:
        found = sorted(glob.glob(str(path), recursive=True))
        photos = [Photo(pathlib.Path(name), "") for name in found if pathlib.Path(name).is_file()]
    if not photos:
        raise UserError(f"no images at {where}")
    once = {os.path.realpath(photo.path): photo for photo in reversed(photos)}
    return [photo._replace(path=photo.path.absolute()) for photo in reversed(once.values())]


def _below(root: pathlib.Path) -> list[Photo]:
    names = {folder.name for folder in _subfolders(root)}
    splits = "train" in names and names <= set(SPLITS) and bool(_subfolders(root / "train"))
    photos = []
    for path in _images(root):
        folders = path.relative_to(root).parts[splits:-1]
        photos.append(Photo(path, folders[0] if folders else ""))
    return photos


def _lines(path: pathlib.Path) -> list[str]:
    try:
        lines = path.read_text("utf-8-sig").split("\n")
        return [line.strip() for line in lines if line.strip()]
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"cannot read {path}: save it as UTF-8") from error


def files_of(photos: Sequence[Photo]) -> Dataset:
    """Images in their order, unchecked, without classes or sizes."""
    return Dataset(
        records=Files([photo.path for photo in photos]),
        positions=np.arange(len(photos)),
        labels=np.zeros(len(photos), np.int32),
        sizes=np.zeros((len(photos), 2), np.int32),
        names=[str(photo.path) for photo in photos],
        upright=True,
    )


def _subfolders(folder: pathlib.Path) -> list[pathlib.Path]:
    try:
        return sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))
    except OSError as error:
        raise UserError(f"cannot read the folder {folder}: {error.strerror}") from error


def _images(folder: pathlib.Path) -> list[pathlib.Path]:
    found, visited = [], set()
    for parent, folders, names in os.walk(folder, followlinks=True, onerror=_refuse_folder):
        real = os.path.realpath(parent)
        if real in visited:  # By a link that leads back up.
            folders.clear()
            continue
        visited.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        paths = (pathlib.Path(parent, name) for name in names if not name.startswith("."))
        found += [path for path in paths if path.suffix.lower() in SUFFIXES]
    return sorted(found)


def _refuse_folder(error: OSError) -> None:
    raise UserError(f"cannot read the folder {error.filename}: {error.strerror}") from error


def read_table(table: pathlib.Path) -> list[Photo]:
    """Images that a CSV or Parquet table lists.

    Its columns are `path` (absolute, or relative to the table's folder), `label`, and, where
    wanted, `split` (one of `SPLITS`) and `superlabel`.

    Raises:
        UserError: The table cannot be read, lacks a column or a value, names a file twice, or
            puts a label into two groups.
    """
    rows = _rows(table)
    groups: dict[str, str | None] = {}
    seen: dict[str, int] = {}
    photos = []
    for number, row in enumerate(rows, start=1):
        where = f"{table}, row {number}"
        photo = _photo(table.parent, row, where)
        if photos and (photo.split is None) != (photos[0].split is None):
            raise UserError(f"{where}: either every row has a split, or none")
        first = seen.setdefault(os.path.realpath(photo.path), number)
        if first != number:
            raise UserError(f"{where}: {row['path']} is in row {first} already")
        group = groups.setdefault(photo.label, photo.superlabel)
        if group != photo.superlabel:
            raise UserError(
                f"{where}: label {photo.label} has the superlabel {photo.superlabel} "
                f"here and {group} before"
            )
        photos.append(photo)
    if not photos:
        raise UserError(f"{table} has no rows")
    return photos


def _rows(table: pathlib.Path) -> list[dict[str, Any]]:
    try:
        if table.suffix.lower() == ".csv":
            with table.open(newline="", encoding="utf-8-sig") as file:
                reader = csv.DictReader(file)
                rows, columns = list(reader), reader.fieldnames or []
        else:
            import pyarrow.parquet

            content = pyarrow.parquet.read_table(table)
            rows, columns = content.to_pylist(), content.column_names
    except OSError as error:
        raise UserError(f"cannot read {table}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"cannot read {table}: save it as UTF-8") from error
    except (csv.Error, ValueError) as error:
        raise UserError(f"cannot read {table}: {str(error).splitlines()[0]}") from error
    for column in ("path", "label"):
        if column not in columns:
            found = f"its columns are {', '.join(columns)}" if columns else "it is empty"
            hint = "; commas separate columns" if len(columns) == 1 else ""
            raise UserError(f"{table} has no column {column}; {found}{hint}")
    return rows


def _photo(folder: pathlib.Path, row: Mapping[str, Any], where: str) -> Photo:
    value = {
        name: None if row.get(name) in (None, "") else str(row[name])
        for name in ("path", "label", "split", "superlabel")
    }
    for name in ("path", "label"):
        if value[name] is None:
            raise UserError(f"{where}: no {name}")
    if value["split"] is not None and value["split"] not in SPLITS:
        raise UserError(
            f"{where}: split is {value['split']}; it must be one of {', '.join(SPLITS)}"
        )
    return Photo(folder / value["path"], value["label"], value["split"], value["superlabel"])


def fingerprint(photos: Sequence[Photo]) -> str:
    """Differs where a file, a label or the order does, as far as files tell unread."""
    return _hash((*_file_facts(photo), photo.label) for photo in photos)


def _measured(photos: Sequence[Photo]) -> Int[np.ndarray, "photos 3"]:
    """Height, width and a checksum of each image; from the cache where no file has changed.

    Raises:
        UserError: Images cannot be read; the message names the first of them.
    """
    known = cache_folder() / "photos" / f"{_hash(map(_file_facts, photos))}.npy"
    with contextlib.suppress(OSError, ValueError, EOFError):
        measured = np.load(known)
        if measured.shape == (len(photos), 3):
            return measured
    with concurrent.futures.ThreadPoolExecutor(usable_cores()) as pool:
        measured = list(
            tqdm.tqdm(
                pool.map(_measure, (photo.path for photo in photos)),
                "checking images",
                len(photos),
                unit="image",
                disable=None,
                leave=False,
            )
        )
    broken = [outcome for outcome in measured if isinstance(outcome, str)]
    if broken:
        more = f" (and {len(broken) - _NAMED} more)" if len(broken) > _NAMED else ""
        raise UserError(
            f"cannot read {len(broken)} of {len(photos)} images: "
            f"{'; '.join(broken[:_NAMED])}{more}; mend or remove them"
        )
    found = np.array(measured)
    with console.tolerating(f"the sizes of the images ({known})"):
        known.parent.mkdir(parents=True, exist_ok=True)
        unfinished = known.with_name(f".{known.stem}-{os.getpid()}.npy")
        np.save(unfinished, found)
        unfinished.replace(known)
    return found


def _measure(path: pathlib.Path) -> tuple[int, int, int] | str:
    """Height, width and checksum of an image, or why it cannot be read."""
    try:
        content = path.read_bytes()
        image = pixels.decode(content, channels=3, upright=True)
    except Exception as error:  # Decoders of damaged files raise whatever they meet.
        return f"{path} ({pixels.reason(error)})"
    return image.height, image.width, zlib.crc32(content)


def _file_facts(photo: Photo) -> tuple[Any, ...]:
    """What changes where a file does, as far as can be told without reading it."""
    try:
        stat = photo.path.stat()
    except OSError:
        return (str(photo.path.absolute()), None)
    return (str(photo.path.absolute()), stat.st_size, stat.st_mtime_ns)


def _hash(facts: Iterable[tuple[Any, ...]]) -> str:
    digest = hashlib.sha256()
    for fact in facts:
        digest.update(repr(fact).encode())
    return digest.hexdigest()[:32]


def _split(
    config: ConfigDict,
    path: pathlib.Path,
    photos: Sequence[Photo],
    measured: Int[np.ndarray, "photos 3"],
) -> Splits:
    """Parts the images as they say themselves, or by class at random."""
    data = config.data
    root = (path if path.is_dir() else path.parent).absolute()
    facts = (
        (os.path.relpath(photo.path.absolute(), root), *photo[1:], *row)
        for photo, row in zip(photos, measured.tolist(), strict=True)
    )
    fingerprint = _hash(facts)
    everything = Dataset(
        records=Files([photo.path for photo in photos]),
        positions=np.arange(len(photos)),
        labels=np.unique([photo.label for photo in photos], return_inverse=True)[1],
        sizes=measured[:, :2].astype(np.int32),
        names=[str(photo.path) for photo in photos],
        superlabels=_superlabels(photos),
        upright=True,
        fast=data.decoder == "fast",
    )
    everything = with_cache(everything, fingerprint, config)
    given = np.array([photo.split or "" for photo in photos])
    gallery = None
    if photos[0].split is None:
        rest, test = hold_out(everything, data.test_classes, data.split_seed, "test")
        if test is None:
            raise UserError(f"{path} says nothing of splits; set --config.data.test_classes=0.25")
        train, validation = hold_out(rest, data.validation_classes, data.split_seed, "validation")
    else:
        parts = {n: everything.take(np.flatnonzero(given == n)) for n in SPLITS if n in given}
        _check_splits(path, set(parts))
        test, gallery = parts.get("test", parts.get("query")), parts.get("gallery")
        train, validation = parts["train"].renumbered(), parts.get("validation")
        if validation is None:
            train, validation = hold_out(
                train, data.validation_classes, data.split_seed, "validation"
            )
        _check_overlap(path, photos)
    splits = Splits(train, validation, test, gallery, fingerprint)
    check_classes(str(path), splits)
    fill_cache(everything, data.channels)
    return splits


def _superlabels(photos: Sequence[Photo]) -> Int[np.ndarray, " photos"] | None:
    if all(photo.superlabel is None for photo in photos):
        return None
    return np.unique([photo.superlabel or "" for photo in photos], return_inverse=True)[1]


def _check_overlap(path: pathlib.Path, photos: Sequence[Photo]) -> None:
    """Tells of classes in two parts, and refuses to choose by what is to be reported."""
    classes = {split: {p.label for p in photos if p.split == split} for split in SPLITS}
    reported = classes["test"] | classes["query"] | classes["gallery"]
    if chosen := classes["validation"] & reported:
        raise UserError(
            f"{path} has {len(chosen)} classes in both validation and test, such as {min(chosen)}; "
            "the best model would be chosen on what it is tested on"
        )
    for name, others in (("validation", classes["validation"]), ("test", reported)):
        if shared := classes["train"] & others:
            console.warn(
                f"{len(shared)} of the classes in {path} are in both train and {name}, "
                f"such as {min(shared)}"
            )


def _check_splits(path: pathlib.Path, given: set[str]) -> None:
    tests = given - {"train", "validation"}
    if "train" not in given or tests not in ({"test"}, {"query", "gallery"}):
        raise UserError(
            f"{path} has the splits {', '.join(sorted(given))}; "
            "it needs train, and either test or both query and gallery"
        )
