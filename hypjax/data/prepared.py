"""Opens prepared datasets as training, validation and test parts."""

import hashlib
from collections.abc import Mapping

import numpy as np
from jaxtyping import Shaped

from hypjax.config.rules import refuse
from hypjax.data.dataset import (
    Dataset,
    Decoding,
    HeldOutClasses,
    Splits,
    check_classes,
    fill_cache,
    hold_out,
    hold_out_validation,
    with_host_cache,
)
from hypjax.data.preparation import prepare
from hypjax.data.records import Records, open_records
from hypjax.errors import UserError


def open_prepared(
    name: str, data_dir: str | None, decoding: Decoding, held_out: HeldOutClasses
) -> Splits:
    """Opens a prepared dataset; glyphs is prepared first if necessary.

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
    builder = prepare.open_builder(name, data_dir)
    records = {split: open_records(builder, split) for split in builder.info.splits}
    fingerprint = _fingerprint(builder.info.full_name, records)
    groups = _group_names(records)
    parts = {
        split: with_host_cache(
            _dataset(part, groups, decoding.fast), f"{fingerprint}-{split}", decoding
        )
        for split, part in records.items()
    }
    note = prepare.describe_partial(name, prepare.count(builder))
    notes = () if note is None else (note,)
    if "train" not in parts:
        raise UserError(f"this copy of {name} in {builder.data_dir} has no training images")
    train, test, gallery = parts["train"].renumbered(), parts.get("test"), None
    if {"query", "gallery"} <= parts.keys():
        test, gallery = parts["query"], parts["gallery"]
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
    train, validation = hold_out_validation(train, held_out)
    splits = Splits(train, validation, test, gallery, fingerprint, notes)
    check_classes(name, splits)
    for part in parts.values():
        fill_cache(part, decoding.channels)
    return splits


def _fingerprint(full_name: str, records: Mapping[str, Records]) -> str:
    """Hashes a dataset's name and version, and the labels, sizes and checksums of its images."""
    digest = hashlib.sha256(full_name.encode())
    for part in records.values():
        for array in (part.labels, part.sizes, part.checksums):
            digest.update(array.tobytes())
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
