"""Opens what a configuration names: a prepared benchmark, or own images."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Shaped
from ml_collections import ConfigDict

from hypjax.config.rules import refuse
from hypjax.data import fast_jpeg
from hypjax.data.dataset import Dataset, Splits, check_classes, fill_cache, hold_out, with_cache
from hypjax.errors import UserError

if TYPE_CHECKING:  # It imports TFDS, which own images do without.
    from hypjax.data.records import Records


def open_splits(config: ConfigDict) -> Splits:
    """Opens a dataset, and prepares it first if it can be made without any download.

    Args:
        config: The run's whole configuration.

    Raises:
        UserError: The dataset is unknown, is not prepared or cannot be read, or has too few
            classes.
    """
    if config.data.decoder == "fast":
        fast_jpeg.require()
    if config.data.name == "folder":
        from hypjax.data.photos import open_photos

        splits = open_photos(config)
    else:
        splits = open_benchmark(config)
    return splits._replace(notes=(*splits.notes, *_pixel_notes(config.data)))


def _pixel_notes(data: ConfigDict) -> Iterator[str]:
    """In what pixels are not the protocol's."""
    if data.decoder == "fast":
        yield "decoded by the fast option: pixels differ a little from the protocol's"
    if data.stored_side is not None:
        yield (
            f"training images' shorter sides are scaled down to {data.stored_side} pixels before "
            "they are cropped: crops are blurrier than the protocol's"
        )


def open_benchmark(config: ConfigDict) -> Splits:
    """Opens a prepared benchmark.

    Where a partial copy has no test images, `data.test_classes` takes the test classes out of the
    training classes.

    Raises:
        UserError: As `open_splits`.
    """
    from hypjax.data import records
    from hypjax.data.preparation import prepare

    name, data = config.data.name, config.data
    builder = prepare.open_builder(name, config.run.data_dir)
    opened = {split: records.open_records(builder, split) for split in builder.info.splits}
    groups = _groups(opened)
    digest = hashlib.sha256(builder.info.full_name.encode())
    for part in opened.values():
        for array in (part.labels, part.sizes, part.checksums):
            digest.update(array.tobytes())
    fingerprint = digest.hexdigest()[:32]
    parts = {
        split: with_cache(_dataset(part, groups, data), f"{fingerprint}-{split}", config)
        for split, part in opened.items()
    }
    note = prepare.partial(name, prepare.count(builder))
    notes = () if note is None else (note,)
    if "train" not in parts:
        raise UserError(f"this copy of {name} in {builder.data_dir} has no training images")
    train, test, gallery = parts["train"].renumbered(), parts.get("test"), None
    if {"query", "gallery"} <= parts.keys():
        test, gallery = parts["query"], parts["gallery"]
    if test is None:
        train, test = hold_out(train, data.test_classes, data.split_seed, "test")
        if test is None:
            raise UserError(
                f"this copy of {name} has no test images; to test on some of its training classes, "
                "set --config.data.test_classes=0.5"
            )
        notes += (f"tested on {test.num_classes} of the training classes, held out",)
    elif data.test_classes:
        refuse("data.test_classes", data.test_classes, f"0: {name} has test classes of its own")
    train, validation = hold_out(train, data.validation_classes, data.split_seed, "validation")
    splits = Splits(train, validation, test, gallery, fingerprint, notes)
    check_classes(name, splits)
    for part in parts.values():
        fill_cache(part, data.channels)
    return splits


def _groups(parts: Mapping[str, Records]) -> Shaped[np.ndarray, " groups"]:
    """Names of the groups of classes in all splits, each once, sorted."""
    named = [part.superlabels for part in parts.values() if part.superlabels is not None]
    return np.unique(np.concatenate(named)) if named else np.array([])


def _dataset(part: Records, groups: Shaped[np.ndarray, " groups"], data: ConfigDict) -> Dataset:
    return Dataset(
        records=part.images,
        positions=np.arange(len(part.labels)),
        labels=part.labels,
        sizes=part.sizes,
        names=part.names,
        superlabels=np.searchsorted(groups, part.superlabels) if len(groups) else None,
        fast=data.decoder == "fast",
    )
