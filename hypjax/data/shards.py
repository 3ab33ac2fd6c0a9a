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
from collections.abc import Sequence
from typing import Any

import numpy as np

from hypjax.data.dataset import Dataset, stacked, table_of_names
from hypjax.data.fetching import TARS
from hypjax.data.folders import FolderWalk, is_image_name
from hypjax.data.texts import caption_column
from hypjax.errors import UserError, explained, require_package
from hypjax.system import hub
from hypjax.system.columns import Options, find_column, require_options
from hypjax.types import class_name, class_names, split_names

SHARDS = {".parquet": "parquet", ".arrow": "arrow", ".tar": "webdataset"}
# A file in a .tar file, as `datasets` divides its name. It passes over hidden files.
_MEMBER = re.compile(r"((?:.*/)?(?![.]|__)[^./]+)[.]([^/]*)")
_OPTIONS = ("image", "label", "coarse_label", "caption", "split", "subset")


def find_dataset(location: str, options: Options, *, captioned: bool = False) -> Dataset | None:
    """Lists the images of a dataset that the library `datasets` reads.

    A location is hf://OWNER/NAME or hf://OWNER/NAME@TAG; a .parquet, .arrow or .tar file; a pattern
    such as photos-*.tar; a folder of such files without images; or a folder that `save_to_disk`
    wrote. Returns None for other locations, such as a folder of images.

    The options are the columns `image`, `label`, `coarse_label` and, if `captioned`, `caption`; the
    `split`, or several splits (train+test) that are joined; and the `subset` of a repository. If
    there are several splits and none is named, they become the splits of the images. Images are
    named like hf://OWNER/NAME/train/17.
    """
    if (loaded := _load(location, options)) is None:
        return None
    known = [x for x in _OPTIONS if captioned or x != "caption"]
    require_options(options, known, location)
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
            prefix = f"{location}/{split}".rstrip("/")
            table = table_of(dataset, location, options, prefix, captioned=captioned)
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
        if kind is None or (kind == "parquet" and is_table(path, options)):
            return None
        files = FolderWalk().matches(str(path.absolute())) or [str(path)]
        _check_samples(files, location, options)
        # The library takes names for patterns.
        return _library().load_dataset(kind, data_files=[*map(glob.escape, files)])


def _check_samples(files: Sequence[str], location: str, options: Options) -> None:
    """Rejects .tar files of which `datasets` would leave out images or labels without a word."""
    names = collections.defaultdict(list)  # Of files, by column.
    columns_of: dict[tuple[str, str], set[str]] = {}  # By file and sample.
    for file in sorted(file for file in files if file.lower().endswith(TARS)):
        with tarfile.open(file) as archive:
            for name in (x.name.removeprefix("./") for x in archive if x.isfile()):
                if match := _MEMBER.fullmatch(name):
                    names[match[2]].append(name)
                    columns_of.setdefault((file, match[1]), set()).add(match[2])
    read = next(iter(columns_of.values()), set())  # `datasets` reads only the first's columns.
    images = [column for column in names if is_image_name(f"_.{column}")]
    image = max(images, key=lambda column: (len(names[column]), -len(column)), default="")
    if "image" in options:
        images = [image := options["image"]]
    named = options.get("label"), options.get("caption")
    used = names.keys() & {*images, *named, "cls", "txt", "json"}
    unread = {*images} - {image} | used - read
    if lost := sorted(name for column in unread for name in names[column]):
        total = sum(len(names[column]) for column in used)
        raise UserError(
            f"{location}: {len(lost)} of {total} images and labels would be lost, such as "
            f"{lost[0]}: the first dot in a name ends the name of a sample, and all samples need "
            f"the suffixes of the first ({', '.join(sorted(read)[:9])}), of which only one is an "
            "image; rename or convert the files, or name a column by ?image="
        )
    for (file, sample), columns in [*columns_of.items()][:5]:  # Which `datasets` compares.
        if lacking := (used & read) - columns:
            problem = f"{sample} in {file} has no .{min(lacking)}, unlike the first sample"
            raise UserError(f"{problem}; add it, or leave the sample out")


def _library() -> types.ModuleType:
    require_package("datasets", "a dataset in files of many images", "hypjax[datasets]")
    import datasets

    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # Otherwise errors appear twice.
    return datasets


def is_table(path: pathlib.Path, options: Options) -> bool:
    """Whether a .parquet file lists paths of images, and holds no images."""
    if "image" in options or (glob.has_magic(str(path)) and not path.is_file()):
        return False
    import pyarrow.parquet  # Takes a twentieth of a search's time.

    try:
        schema = pyarrow.parquet.read_schema(path)
    except Exception:  # The file is damaged or missing: the reader of tables reports the error.
        return True
    holds_images = "binary" in str(schema.types)  # In structs, too.
    return "path" in {*options, *map(str.lower, schema.names)} or not holds_images


def table_of(
    dataset: Any,
    where: str,
    options: Options | None = None,
    prefix: str | None = None,
    *,
    captioned: bool = False,
) -> Dataset:
    """Makes a table of the images of a `datasets.Dataset`.

    Without options, the column of images is the one of type `Image`, or else of bytes, and the
    column of labels is the first with a usual name, or else of type `ClassLabel`. `where` is for
    messages. The names of the images begin with `prefix`, unless they are in memory. If
    `captioned`, another column holds a text or a list of texts for each image.
    """
    library, column_types, options = _library(), dataset.features, options or {}
    images = [name for name, kind in column_types.items() if isinstance(kind, library.Image)]
    images = images or [name for name, kind in column_types.items() if _holds_bytes(kind)]
    if "image" not in options and len(images) != 1:
        columns = ", ".join(column_types)
        raise UserError(f"{where}: name the column of images by ?image= ({columns})")
    image = find_column(column_types, "image", options, where) or images[0]
    encoded = dataset.cast_column(image, library.Image(decode=False))
    records = encoded.select_columns([image])[image]  # Images are read when they are accessed.
    facts = dataset.remove_columns([image]).flatten()
    column_types, captions = facts.features, None
    if captioned:
        caption = find_column(column_types, "caption", options, where)
        if caption is None:
            advice = f"rename one of {', '.join(column_types)}, or set ?caption=COLUMN"
            raise UserError(f"{where} has no column caption; {advice}")
        captions = caption_column(facts[caption][:])
        column_types = {name: kind for name, kind in column_types.items() if name != caption}
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
    table = table_of_names(
        records,
        names,
        _values(facts, label, where) if label else [""] * len(dataset),
        splits=_values(facts, "split", where) if "split" in column_types else (),
        coarse_labels=_values(facts, coarse_label, where) if coarse_label else (),
        file_versions=versions,
    )
    return dataclasses.replace(table, captions=captions)


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
