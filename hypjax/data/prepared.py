"""Opens prepared datasets as training, validation and test parts."""

import dataclasses
import hashlib
import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Shaped

from hypjax.config.rules import refuse
from hypjax.data.dataset import Dataset, Decoding, fill_cache, with_host_cache
from hypjax.data.parts import HeldOutClasses, Splits, check_classes, hold_out, hold_out_validation
from hypjax.data.preparation import prepare
from hypjax.data.records import Records, open_records
from hypjax.data.relations import JUDGEMENTS, PAIRS, read_judgements, read_pairs
from hypjax.errors import UserError
from hypjax.types import Judgements


def open_prepared(
    name: str, data_dir: str | None, decoding: Decoding, held_out: HeldOutClasses
) -> Splits:
    """Opens a prepared dataset; a built-in one is prepared first if necessary.

    If a partial copy has no test images, test classes are held out from the training classes.

    Args:
        name: Name of the dataset.
        data_dir: Folder or cloud URL of prepared datasets; TFDS's default if None.
        decoding: How images are decoded and cached.
        held_out: Classes to hold out from the training classes.

    Raises:
        UserError: If the dataset is unknown, is not prepared, cannot be read, or has too few
            classes.
    """
    opened = _open(name, data_dir, decoding)
    parts, notes = opened.parts, opened.notes
    train, test, gallery = parts.get("train"), parts.get("test"), None
    if {"query", "gallery"} <= parts.keys():
        test, gallery = parts["query"], parts["gallery"]
    if train is None and opened.judgements is None:
        raise UserError(
            f"this copy of {name} in {opened.folder} has no training images, nor judged queries"
        )
    validation = None
    if train is not None:
        train = train.renumbered()
    if test is None:
        train, test = hold_out(train, held_out.test, held_out.seed, "test")
        if test is None:
            raise UserError(
                f"this copy of {name} has no test images; to test on some of its training classes, "
                "set --config.data.test_classes=0.5"
            )
        notes += (f"tested on {test.num_classes} of the training classes, held out",)
    elif held_out.test:
        refuse("data.test_classes", held_out.test, f"0: {name} has its own test classes")
    if train is not None:
        train, validation = hold_out_validation(train, held_out)
    splits = Splits(
        *(train, validation, test, gallery, opened.fingerprint, notes),
        judgements=opened.judgements,
        name=name,
    )
    check_classes(name, splits)
    for part in parts.values():
        fill_cache(part, decoding.channels)
    return splits


def open_gallery(
    name: str, data_dir: str | None, decoding: Decoding
) -> tuple[Dataset, tuple[str, ...]]:
    """Opens a prepared dataset that has a gallery alone, which is not decoded into a cache.

    Arguments and errors are those of `open_prepared`.

    Returns:
        The images, and remarks on the copy.
    """
    opened = _open(name, data_dir, decoding)
    return opened.parts["gallery"], opened.notes


class _Opened(NamedTuple):
    """A prepared dataset.

    Attributes:
        parts: Its images by split.
        judgements: What its queries should find, if it is judged.
        fingerprint: Hash that differs if any image or relation differs.
        notes: Remarks on the copy.
        folder: Where it is.
    """

    parts: dict[str, Dataset]
    judgements: Judgements | None
    fingerprint: str
    notes: tuple[str, ...]
    folder: str


def _open(name: str, data_dir: str | None, decoding: Decoding) -> _Opened:
    """Opens all splits of a prepared dataset, with their relations."""
    builder = prepare.open_builder(name, data_dir)
    records = {split: open_records(builder, split) for split in builder.info.splits}
    pairs = judged = None
    if PAIRS in builder.TABLES and "train" in records:
        pairs = read_pairs(builder, records["train"].names)
    if JUDGEMENTS in builder.TABLES and {"query", "gallery"} <= records.keys():
        judged = read_judgements(builder, records["query"].names, records["gallery"].names)
    relations = [] if pairs is None else [pairs]
    relations += [] if judged is None else [judged.boxes, *itertools.chain(*judged.judgements)]
    fingerprint = _fingerprint(builder.info.full_name, records, relations)
    groups = _group_names(records)
    parts = {
        split: with_host_cache(
            _dataset(part, groups, decoding.fast), f"{fingerprint}-{split}", decoding
        )
        for split, part in records.items()
    }
    if pairs is not None:
        parts["train"] = dataclasses.replace(parts["train"], pairs=pairs)
    if judged is not None:
        parts["query"] = dataclasses.replace(parts["query"], boxes=judged.boxes)
    note = prepare.describe_partial(name, prepare.count(builder))
    return _Opened(
        parts,
        judged and judged.judgements,
        fingerprint,
        () if note is None else (note,),
        str(builder.data_dir),
    )


def _fingerprint(
    full_name: str, records: Mapping[str, Records], relations: Sequence[Shaped[np.ndarray, "..."]]
) -> str:
    """Hashes a dataset's name and version, its relations, and its images.

    Of the images these are the labels, sizes and checksums.
    """
    digest = hashlib.sha256(full_name.encode())
    for part in records.values():
        for array in (part.labels, part.sizes, part.checksums):
            digest.update(array.tobytes())
    for array in relations:
        digest.update(repr(array.shape).encode() + array.tobytes())
    return digest.hexdigest()[:32]


def _group_names(records: Mapping[str, Records]) -> Shaped[np.ndarray, " groups"]:
    """Returns the sorted, distinct names of class groups in all splits."""
    named = [part.superlabels for part in records.values() if part.superlabels is not None]
    return np.unique(np.concatenate(named)) if named else np.array([])


def _dataset(part: Records, groups: Shaped[np.ndarray, " groups"], fast: bool) -> Dataset:
    return Dataset(
        records=part.images,
        positions=np.arange(len(part.labels)),
        labels=part.labels,
        sizes=part.sizes,
        names=part.names,
        superlabels=np.searchsorted(groups, part.superlabels) if len(groups) else None,
        class_names=part.class_names,
        group_names=groups if len(groups) else None,
        fast=fast,
    )
