"""Datasets of the Hugging Face hub, and in Parquet, Arrow and tar files, read by `datasets`."""

import collections
import dataclasses
import glob
import os
import pathlib
import re
import tarfile
import types
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow.parquet

from hypjax.data.dataset import Dataset, stacked, table_of_names
from hypjax.data.fetching import TARS
from hypjax.data.folders import FolderWalk
from hypjax.data.pixels import image_suffixes
from hypjax.errors import UserError, explained, require_package
from hypjax.system import console, hub
from hypjax.system.columns import Options, find_column, require_options
from hypjax.system.files import column_names
from hypjax.types import class_name, class_names, split_names

SHARDS = {".parquet": "parquet", ".arrow": "arrow", ".tar": "webdataset"}
_FIRST_SAMPLES = 5  # Of a .tar file; `datasets` knows only their columns.
_MAX_LISTED = 9  # Columns that a message lists.
_OPTIONS = ("image", "label", "coarse_label", "split", "subset")


def find_dataset(location: str, options: Options) -> Dataset | None:
    """Lists the images of a dataset that the library `datasets` reads.

    A location is hf://OWNER/NAME or hf://OWNER/NAME@TAG; a .parquet, .arrow or .tar file; a pattern
    such as photos-*.tar; a folder of such files without images; or a folder that `save_to_disk`
    wrote. Returns None for other locations, such as a folder of images.

    The options are the columns `image`, `label` and `coarse_label`; the `split`, or several splits
    (train+test) that are joined; and the `subset` of a repository. If there are several splits and
    none is named, they become the splits of the images. Images are named like
    hf://OWNER/NAME/train/17.
    """
    loaded = _load(location, options)
    if loaded is None:
        return None
    require_options(options, _OPTIONS, location)
    datasets = dict(loaded) if isinstance(loaded, dict) else {str(loaded.split or ""): loaded}
    if "split" in options:
        chosen = options["split"].replace(" ", "+").split("+")
        if unknown := sorted(set(chosen) - set(datasets)):
            raise UserError(f"{location}: no split is {unknown[0]}; they are {', '.join(datasets)}")
        datasets = {split: datasets[split] for split in chosen}
    keeps_splits = len(datasets) > 1 and "split" not in options
    names = split_names(datasets) if keeps_splits else [""] * len(datasets)
    tables = []
    for name, (split, dataset) in zip(names, datasets.items(), strict=True):
        if len(dataset):
            table = table_of(dataset, location, options, f"{location}/{split}".rstrip("/"))
            splits = np.full(len(table), name) if name else table.splits
            tables.append(dataclasses.replace(table, splits=splits))
    if not tables:
        raise UserError(f"{location} has no images")
    return stacked(tables)


def _load(location: str, options: Options) -> Any:
    """Loads a location with the library `datasets`; None if it is no dataset."""
    path, subset = pathlib.Path(location).expanduser(), options.get("subset")
    with explained(f"`datasets` cannot read {location}"):
        if hub.is_repository(location):
            name, revision = hub.split(location)
            return _library().load_dataset(name, subset, revision=revision)
        if path.is_dir():
            if any((path / name).exists() for name in ("dataset_info.json", "dataset_dict.json")):
                return _library().load_from_disk(str(path))
            files = [*FolderWalk().files(path)]
            if SHARDS.keys().isdisjoint(pathlib.PurePath(file).suffix.lower() for file in files):
                return None
            _check_samples([str(path / file) for file in files], location, options)
            return _library().load_dataset(str(path.absolute()), subset)
        kind = SHARDS.get(".tar" if path.name.lower().endswith(TARS) else path.suffix)
        if kind is None or (kind == "parquet" and _is_table(path, options)):
            return None
        files = FolderWalk().matches(str(path.absolute())) or [str(path)]
        _check_samples(files, location, options)
        files = [*map(glob.escape, files)]  # The library takes them for patterns.
        return _library().load_dataset(kind, data_files=files)


def _check_samples(files: Sequence[str], location: str, options: Options) -> None:
    """Rejects .tar files of which `datasets` would leave out images or labels without a word.

    A sample's name ends at the first dot, its files must follow each other, and `datasets` reads
    only columns that all of the first samples have.
    """
    examples: dict[str, str] = {}  # A file of each column.
    counts, first_samples = collections.Counter(), collections.defaultdict(set)
    previous = None
    for sample, column, name in _members(files):
        if sample in first_samples and sample != previous:
            problem = f"{name} does not follow the other files of its sample"
            raise UserError(f"{location}: {problem}; pack the files in the order of their names")
        if sample in first_samples or len(first_samples) < _FIRST_SAMPLES:
            first_samples[sample].add(column)
        counts[column] += 1
        examples.setdefault(column, name)
        previous = sample
    images = [x for x in counts if pathlib.PurePath(f"_.{x}").suffix.lower() in image_suffixes()]
    total = sum(counts[column] for column in images)
    if len(images) > 1 and "image" in options:
        read, images = counts[options["image"]], [options["image"]]
        console.say(f"{location}: {read} of {total} images are read, those named .{images[0]}")
    elif len(images) > 1:
        usual = max(images, key=lambda column: (counts[column], "." not in column))
        other = max((x for x in images if x != usual), key=lambda column: "." in column)
        cause = "all images of a WebDataset must have the same suffix; convert these"
        if "." in usual + other:
            cause = "in a WebDataset the first dot ends the name of a sample; write other dots as -"
        lost = f"{total - counts[usual]} of {total} images would be lost, such as {examples[other]}"
        listed = ", ".join(images[:_MAX_LISTED])
        raise UserError(f"{location}: {lost}: {cause}, or name one column by ?image= ({listed})")
    used = counts.keys() & {*images, options.get("label"), "cls", "txt", "json"}
    known = [*first_samples.values()]
    if lost := used.union(*known) - set.intersection(*known or [set()]):
        column = min(lost, key=counts.get)
        problem = f"{examples[column]} would be lost: not all of the first samples have .{column}"
        raise UserError(f"{location}: {problem}; give all samples files of the same suffixes")
    if counts and len(counts) == len(images) and all("/" in name for name in examples.values()):
        console.warn(f"{location}: folders in these .tar files are no classes; unpack the files")


def _members(files: Sequence[str]) -> Iterator[tuple[tuple[str, str], str, str]]:
    """Yields the sample, the column and the name of each file in .tar files, as `datasets` does."""
    for file in sorted(file for file in files if file.lower().endswith(TARS)):
        with tarfile.open(file) as archive:
            for member in archive:
                match = re.fullmatch(r"((?:.*/|)[^.]+)[.]([^/]*)", member.name)
                if match and member.isfile():
                    yield (file, match[1]), match[2], member.name.removeprefix("./")


def _library() -> types.ModuleType:
    require_package("datasets", "a dataset in files of many images", "hypjax[datasets]")
    import datasets

    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # Otherwise errors appear twice.
    return datasets


def _is_table(path: pathlib.Path, options: Options) -> bool:
    """Whether a .parquet file lists paths of images, and holds no images."""
    if "image" in options or (glob.has_magic(str(path)) and not path.is_file()):
        return False
    try:
        schema = pyarrow.parquet.read_schema(path)
        holds_images = any("binary" in str(kind) for kind in schema.types)  # In structs, too.
        return "path" in options or "path" in column_names(schema.names) or not holds_images
    except Exception:  # The file is damaged or missing: the reader of tables reports the error.
        return True


def table_of(
    dataset: Any, where: str, options: Options | None = None, prefix: str | None = None
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
    image = find_column(column_types, "image", options, where) or images[0]
    encoded = dataset.cast_column(image, library.Image(decode=False))
    records = encoded.select_columns([image])[image]  # Images are read when they are accessed.
    facts = dataset.remove_columns([image]).flatten()
    column_types = facts.features
    classes = [name for name, kind in column_types.items() if isinstance(kind, library.ClassLabel)]
    label = find_column(column_types, "label", options, where) or next(iter(classes), None)
    coarse_label = find_column(column_types, "coarse_label", options, where)
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


def _values(dataset: Any, column: str, where: str) -> list[str]:
    """Returns a column's values as class names."""
    values = dataset[column][:]
    if names := getattr(dataset.features[column], "names", None):
        return class_names(values, names)
    return [class_name(x, f"{where}, {column} of row {i}") for i, x in enumerate(values)]
