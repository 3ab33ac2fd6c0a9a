"""Opens what a configuration names: a prepared benchmark, or own images."""

import hashlib

import numpy as np
from ml_collections import ConfigDict

from hypjax.data import reduced
from hypjax.data.dataset import Dataset, Splits, fill_cache, hold_out, with_cache
from hypjax.errors import UserError


def open_splits(config: ConfigDict) -> Splits:
    """Opens a dataset, and prepares it first if it can be made without any download.

    Args:
        config: The run's whole configuration.

    Raises:
        UserError: The dataset is unknown, is not prepared or cannot be read, or has too few
            classes.
    """
    fast = config.data.decoder == "fast"
    if fast:
        reduced.require()
    if config.data.name == "folder":
        from hypjax.data.photos import open_photos

        splits = open_photos(config)
    else:
        splits = open_benchmark(config)
    if not fast:
        return splits
    note = "decoded by the fast option: pixels differ a little from the protocol's"
    return splits._replace(notes=(*splits.notes, note))


def open_benchmark(config: ConfigDict) -> Splits:
    """Opens a prepared benchmark.

    Where a partial copy has no test images, `data.test_classes` takes the test classes out of the
    training classes.

    Raises:
        UserError: As `open_splits`.
    """
    from hypjax.data import preparation, records

    name, data = config.data.name, config.data
    builder = preparation.open_builder(name, config.run.data_dir)
    opened = {split: records.open_records(builder, split) for split in builder.info.splits}
    digest = hashlib.sha256(builder.info.full_name.encode())
    for part in opened.values():
        for array in (part.labels, part.sizes, part.checksums):
            digest.update(array.tobytes())
    fingerprint = digest.hexdigest()[:32]
    parts = {
        split: with_cache(_dataset(part, data.decoder), f"{fingerprint}-{split}", config)
        for split, part in opened.items()
    }
    note = preparation.partial(name, preparation.count(builder))
    notes = () if note is None else (note,)
    train, test = parts["train"].renumbered(), parts.get("test", parts.get("query"))
    if test is None:
        train, test = hold_out(train, data.test_classes, data.split_seed, "test")
        if test is None:
            raise UserError(
                f"this copy of {name} has no test images; to test on some of its training classes, "
                "set --config.data.test_classes=0.5"
            )
        notes += (f"tested on {test.num_classes} of the training classes, held out",)
    train, validation = hold_out(train, data.validation_classes, data.split_seed, "validation")
    for part in parts.values():
        fill_cache(part, data.channels)
    return Splits(train, validation, test, parts.get("gallery"), fingerprint, notes)


def _dataset(part: "records.Records", decoder: str) -> Dataset:  # noqa: F821
    groups = part.superlabels
    return Dataset(
        records=part.images,
        positions=np.arange(len(part.labels)),
        labels=part.labels,
        sizes=part.sizes,
        names=part.names,
        superlabels=None if groups is None else np.unique(groups, return_inverse=True)[1],
        fast=decoder == "fast",
    )
