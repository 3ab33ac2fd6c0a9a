"""Users' own images or features as a dataset: checked once, and split by class."""

import concurrent.futures
import dataclasses
import functools
import os
import pathlib
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tqdm
from jaxtyping import Int

from hypjax.data import pixels
from hypjax.data.dataset import (
    Dataset,
    Decoding,
    fill_cache,
    hash_facts,
    table_of_names,
    with_host_cache,
)
from hypjax.data.parts import (
    HeldOutClasses,
    Splits,
    check_classes,
    hold_out,
    hold_out_images,
    hold_out_validation,
)
from hypjax.data.photos import (
    SPLITS,
    TABLES,
    Files,
    check_columns,
    list_folder,
    read_table,
    read_vectors,
    stored_images,
)
from hypjax.data.shards import Rows
from hypjax.errors import UserError
from hypjax.system import console
from hypjax.system.caches import cache_folder
from hypjax.system.files import replacing
from hypjax.system.machine import usable_cores

_FEW = 5  # Of fewer training classes, little holds for others.
_SAME_CLASSES = "tested on other images of the classes that were trained on (data.split=images)"
_MAX_NAMED = 5  # Files that a message names.
_Parts = tuple[Dataset, Dataset | None, Dataset, Dataset | None]  # The first fields of `Splits`.


def open_photos(where: str, decoding: Decoding, held_out: HeldOutClasses) -> Splits:
    """Opens the images of a folder, a table or shards; holds out classes if there are no splits.

    See `photos.list_folder`, `photos.read_table` and `shards.find_dataset`. Every image is decoded
    once to check that it is readable, unless that was done before and no file has changed. Raises
    UserError if one is not, or there are too few classes or images to train or to search.
    """
    path = pathlib.Path(where).expanduser()
    if images := stored_images(where):
        nameless = np.flatnonzero(images.class_names == "")
        if len(nameless):
            name = images.names[nameless[0]]
            raise UserError(f"{name} has no label; name a column of classes by ?label=")
    elif path.is_dir():
        images = list_folder(path, classes_only=True)
    elif path.suffix.lower() in TABLES:
        images = read_table(path)
    else:
        raise UserError(
            f"config.data.path is {path}, which is neither a folder, nor a .csv or .parquet table, "
            "nor a dataset in Parquet, Arrow or tar files"
        )
    root = path if path.is_dir() else path.parent
    names = [os.path.relpath(name, root) for name in images.names]
    return _open(where, images, names, _measure(images), decoding, held_out)


def open_given(rows: Rows, decoding: Decoding, held_out: HeldOutClasses) -> Splits:
    """Opens images in memory, see `photos.rows_in_memory`, as `open_photos` opens files."""
    names = [f"image {i}" for i in range(len(rows.labels))]
    images = table_of_names(Files(rows.images), names, rows.labels, splits=rows.splits or ())
    return _open("the dataset", images, names, _measure_all(images), decoding, held_out)


def open_features(path: str, labels: str | None, held_out: HeldOutClasses) -> Splits:
    """Opens the features of a file; holds out classes if they are not split already.

    `labels` is a file with the classes, if the first one has none. Raises UserError if a file
    cannot be read or is damaged, a class is unknown, or there are too few classes to train or to
    search.
    """
    images = read_vectors(path, labels)
    unknown = np.flatnonzero(images.class_names == "")
    if len(unknown):
        raise UserError(
            f"{path} has {len(unknown)} rows without a class, such as row {unknown[0]}; give them "
            "as the array labels (of a table: the column label), or set --config.data.labels"
        )
    missing = np.full(len(images), "")
    columns = (missing if x is None else x for x in (images.splits, images.groups))
    check_columns(path, images.class_names, *columns)
    return split_photos(path, images, images.fingerprint, held_out)


def _open(
    where: str,
    images: Dataset,
    names: Sequence[str],
    measured: Int[np.ndarray, "images 3"],
    decoding: Decoding,
    held_out: HeldOutClasses,
) -> Splits:
    columns = (images.class_names, images.splits, images.groups, measured)
    facts = zip(names, *(x.tolist() for x in columns if x is not None), strict=True)
    fingerprint = hash_facts(facts)
    sizes = measured[:, :2].astype(np.int32)
    images = dataclasses.replace(images, sizes=sizes, fast=decoding.fast, source=fingerprint)
    images = with_host_cache(images, decoding)
    splits = split_photos(where, images, fingerprint, held_out)
    fill_cache(images, decoding.channels)
    return splits


def split_photos(
    path: str,
    everything: Dataset,
    fingerprint: str,
    held_out: HeldOutClasses,
) -> Splits:
    """Splits images as they are labelled, or holds out classes, or images of each class.

    The path is for messages. Raises UserError if there are too few classes to train or to search.
    """
    if everything.splits is not None:
        parts = _given_splits(path, everything, held_out)
    elif held_out.images:
        train, test = hold_out_images(everything, held_out.seed)
        parts = train, None, test, None
    else:
        parts = _split_classes(path, everything, held_out)
    splits = Splits(*parts, fingerprint, notes=(_SAME_CLASSES,) if held_out.images else ())
    check_classes(path, splits)
    return splits


def _split_classes(path: str, everything: Dataset, held_out: HeldOutClasses) -> _Parts:
    """Holds out random classes; returns no gallery."""
    if 2 <= everything.num_classes < 4 or not held_out.test:
        raise UserError(
            f"{path} has {everything.num_classes} classes and no splits; four or more are needed "
            "to train on two and to test on two others (--config.data.test_classes=0.25); or set "
            "--config.data.split=images, which tests on other images of the same classes"
        )
    rest, test = hold_out(everything, held_out.test, held_out.seed, "test")
    train, validation = hold_out_validation(rest, held_out)
    if train.num_classes < _FEW:
        console.warn(
            f"{train.num_classes} classes are too few to learn what tells apart the "
            f"{test.num_classes} others of the test, so the model may end below the untrained one; "
            "add classes, or set --config.data.split=images"
        )
    return train, validation, test, None


def _given_splits(path: str, everything: Dataset, held_out: HeldOutClasses) -> _Parts:
    """Splits the images as they are labelled."""
    if held_out.images:
        raise UserError(f"{path} has splits already; leave out --config.data.split=images")
    parts = {
        name: everything.take(np.flatnonzero(everything.splits == name))
        for name in SPLITS
        if name in everything.splits
    }
    tests = parts.keys() - {"train", "validation"}
    if "train" not in parts or tests not in ({"test"}, {"query", "gallery"}):
        raise UserError(
            f"{path} has the splits {', '.join(sorted(parts))}; "
            "it needs train, and either test or both query and gallery"
        )
    train, validation = parts["train"].renumbered(), parts.get("validation")
    if validation is None:
        train, validation = hold_out_validation(train, held_out)
    _check_overlap(path, parts)
    return train, validation, parts.get("test", parts.get("query")), parts.get("gallery")


def _check_overlap(path: str, parts: Mapping[str, Dataset]) -> None:
    """Rejects classes shared by validation and test, and warns of classes shared with train."""
    classes = {name: set(parts[name].class_names) if name in parts else set() for name in SPLITS}
    test = classes["test"] | classes["query"] | classes["gallery"]
    if shared := classes["validation"] & test:
        raise UserError(
            f"{path} has {len(shared)} classes in both validation and test, such as {min(shared)}; "
            "the best model would be chosen on what it is tested on"
        )
    for name, others in (("validation", classes["validation"]), ("test", test)):
        if shared := classes["train"] & others:
            console.warn(
                f"{len(shared)} of the classes in {path} are in both train and {name}, "
                f"such as {min(shared)}"
            )


def _measure(images: Dataset) -> Int[np.ndarray, "images 3"]:
    """Returns height, width and checksum of each image, from the cache if no file has changed."""
    cached = cache_folder() / "photos" / f"{hash_facts(images.facts)}.npy"
    if os.path.exists(cached):  # False, too, where the folder may not be read.
        return np.load(cached)
    measured = _measure_all(images)
    with console.tolerating(f"the sizes of the images ({cached})"):
        cached.parent.mkdir(parents=True, exist_ok=True)
        with replacing(cached) as temporary, temporary.open("wb") as file:
            np.save(file, measured)
    return measured


def _measure_all(images: Dataset) -> Int[np.ndarray, "images 3"]:
    """Decodes each image; raises UserError if any cannot be read, and names the first ones."""
    console.say(f"checking {len(images)} images")
    with concurrent.futures.ThreadPoolExecutor(usable_cores()) as pool:
        outcomes = pool.map(functools.partial(_measure_file, images.records), range(len(images)))
        bar = tqdm.tqdm(outcomes, total=len(images), unit="image", disable=None, leave=False)
        outcomes = list(bar)
    broken = [
        f"{name} ({outcome})"
        for name, outcome in zip(images.names, outcomes, strict=True)
        if isinstance(outcome, str)
    ]
    if broken:
        more = f" (and {len(broken) - _MAX_NAMED} more)" if len(broken) > _MAX_NAMED else ""
        raise UserError(
            f"cannot read {len(broken)} of {len(images)} images: "
            f"{'; '.join(broken[:_MAX_NAMED])}{more}; fix or remove them"
        )
    return np.array(outcomes, np.int64)


def _measure_file(records: Sequence[Any], i: int) -> tuple[int, int, int] | str:
    """Returns height, width and checksum of an image, or the reason why it cannot be read."""
    try:
        content = records[i]
        image = pixels.decode(content, channels=3, upright=True)
    except Exception as error:  # Decoders raise almost anything on damaged files.
        return pixels.reason(error)
    checked = content if isinstance(content, bytes) else np.ascontiguousarray(image)
    return image.height, image.width, zlib.crc32(checked)
