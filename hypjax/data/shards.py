"""Datasets of the Hugging Face hub, and in Parquet, Arrow and tar files, read by `datasets`."""

import dataclasses
import glob
import os
import pathlib
import re
import types
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow.parquet

from hypjax.data.dataset import Dataset, stacked, table_of_names
from hypjax.data.folders import FolderWalk
from hypjax.errors import UserError, explained, require_package
from hypjax.system import hub
from hypjax.types import class_name, class_names, split_names

SHARDS = {".parquet": "parquet", ".arrow": "arrow", ".tar": "webdataset"}
# Usual names of the column of labels; the first that a dataset has is used.
_LABELS = ("label", "labels", "class", "target", "fine_label", "cls", "txt")
_OPTIONS = ("image", "label", "coarse_label", "split", "subset")


def find_dataset(where: str) -> Dataset | None:
    """Lists the images of a dataset that the library `datasets` reads.

    A location is hf://OWNER/NAME or hf://OWNER/NAME@TAG; a .parquet, .arrow or .tar file; a pattern
    such as photos-*.tar; a folder of such files without images; or a folder that `save_to_disk`
    wrote. Returns None for other locations, such as a folder of images.

    Options may follow, as in hf://OWNER/NAME?label=species&split=train: the columns `image`,
    `label` and `coarse_label`; the `split`, or several splits (train+test) that are joined; and the
    `subset` of a repository. If there are several splits and none is named, they become the splits
    of the images. Images are named like hf://OWNER/NAME/train/17.
    """
    location, options = _options(where)
    loaded = _load(location, options.get("subset"))
    if loaded is None:
        if options:
            raise UserError(f"{location} is no dataset of Parquet, Arrow or tar files; leave out ?")
        return None
    datasets = dict(loaded) if isinstance(loaded, dict) else {str(loaded.split or ""): loaded}
    if "split" in options:
        chosen = options["split"].replace(" ", "+").split("+")
        if unknown := sorted(set(chosen) - set(datasets)):
            raise UserError(f"{where}: no split is {unknown[0]}; they are {', '.join(datasets)}")
        datasets = {split: datasets[split] for split in chosen}
    keeps_splits = len(datasets) > 1 and "split" not in options
    names = split_names(datasets) if keeps_splits else [""] * len(datasets)
    tables = []
    for name, (split, dataset) in zip(names, datasets.items(), strict=True):
        if len(dataset):
            table = table_of(dataset, where, options, f"{location}/{split}".rstrip("/"))
            splits = np.full(len(table), name) if name else table.splits
            tables.append(dataclasses.replace(table, splits=splits))
    if not tables:
        raise UserError(f"{location} has no images")
    return stacked(tables)


def _options(where: str) -> tuple[str, dict[str, str]]:
    """Splits the options after '?' from a location, unless a file has the whole as its name."""
    location, _, text = where.rpartition("?")
    options = dict(re.findall(r"([a-z_]+)=([^&]*)", text))
    if not location or not options or os.path.exists(os.path.expanduser(where)):
        return where, {}
    if unknown := sorted(options.keys() - set(_OPTIONS)):
        raise UserError(f"{location}: ?{unknown[0]} is none of the options {', '.join(_OPTIONS)}")
    return location, options


def _load(location: str, subset: str | None) -> Any:
    """Loads a location with the library `datasets`; None if it is no dataset."""
    path = pathlib.Path(location).expanduser()
    with explained(f"`datasets` cannot read {location}"):
        if hub.is_repository(location):
            name, revision = hub.split(location)
            return _library().load_dataset(name, subset, revision=revision)
        if path.is_dir():
            if any((path / name).exists() for name in ("dataset_info.json", "dataset_dict.json")):
                return _library().load_from_disk(str(path))
            suffixes = {pathlib.PurePath(file).suffix.lower() for file in FolderWalk().files(path)}
            if suffixes.isdisjoint(SHARDS):
                return None
            return _library().load_dataset(str(path.absolute()), subset)
        if path.suffix not in SHARDS or (path.suffix == ".parquet" and _is_table(path)):
            return None
        files = FolderWalk().matches(str(path.absolute())) or [str(path)]
        files = [*map(glob.escape, files)]  # The library takes them for patterns.
        return _library().load_dataset(SHARDS[path.suffix], data_files=files)


def _library() -> types.ModuleType:
    require_package("datasets", "a dataset in files of many images", "hypjax[datasets]")
    import datasets

    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # Otherwise errors appear twice.
    return datasets


def _is_table(path: pathlib.Path) -> bool:
    """Whether a .parquet file lists paths of images."""
    try:
        names = pyarrow.parquet.read_schema(path).names
        return path.is_file() and "path" in (name.strip().lower() for name in names)
    except Exception:  # The file is damaged: the reader of tables reports the error.
        return True


def table_of(
    dataset: Any, where: str, options: Mapping[str, str] | None = None, prefix: str | None = None
) -> Dataset:
    """Makes a table of the images of a `datasets.Dataset`.

    Without options, the column of images is the one of type `Image`, or else of bytes, and the
    column of labels is the first with a usual name, or else of type `ClassLabel`. `where` is for
    messages. The names of the images begin with `prefix`, unless they are in memory.
    """
    library, column_types, options = _library(), dataset.features, options or {}
    images = [name for name, kind in column_types.items() if isinstance(kind, library.Image)]
    images = images or [name for name, kind in column_types.items() if _holds_bytes(kind)]
    if "image" not in options and len(images) != 1:
        names = ", ".join(column_types)
        raise UserError(f"{where}: name the column of images by ?image= ({names})")
    image = _column(column_types, options.get("image"), images, where)
    encoded = dataset.cast_column(image, library.Image(decode=False))
    records = encoded.select_columns([image])[image]  # Images are read when they are accessed.
    facts = dataset.remove_columns([image]).flatten()
    column_types = facts.features
    classes = [name for name, kind in column_types.items() if isinstance(kind, library.ClassLabel)]
    label = _column(column_types, options.get("label"), [*_LABELS, *classes], where)
    coarse_label = _column(column_types, options.get("coarse_label"), ["coarse_label"], where)
    names, versions = [f"image {i}" for i in range(len(records))], None
    if prefix:
        names = [f"{prefix}/{i}" for i in range(len(records))]
        stats = [(file["filename"], os.stat(file["filename"])) for file in encoded.cache_files]
        files = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
        version = zlib.crc32(repr(files).encode())
        versions = [(name, version) for name in names]
    return table_of_names(
        records,
        names,
        _values(facts, label, where) if label else [""] * len(dataset),
        splits=_values(facts, "split", where) if "split" in column_types else (),
        coarse_labels=_values(facts, coarse_label, where) if coarse_label else (),
        file_versions=versions,
    )


def _holds_bytes(kind: Any) -> bool:
    """Whether a column's type is bytes, or the dict of bytes and path of an undecoded image."""
    kind = kind.get("bytes") if isinstance(kind, dict) else kind
    return getattr(kind, "dtype", None) in ("binary", "large_binary")


def _column(
    columns: Sequence[str], chosen: str | None, usual_names: Sequence[str], where: str
) -> str | None:
    """Returns the chosen column or else the first with a usual name; `label` finds `json.label`."""
    names = usual_names if chosen is None else [chosen]
    matches = [x for name in names for x in columns if f".{x}".endswith(f".{name}")]
    if chosen is not None and not matches:
        raise UserError(f"{where} has no column {chosen}; its columns are {', '.join(columns)}")
    return matches[0] if matches else None


def _values(dataset: Any, column: str, where: str) -> list[str]:
    """Returns a column's values as class names."""
    values = dataset[column][:]
    if names := getattr(dataset.features[column], "names", None):
        return class_names(values, names)
    return [class_name(x, f"{where}, {column} of row {i}") for i, x in enumerate(values)]
