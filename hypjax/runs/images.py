"""Opens the images named in a run's configuration."""

import os
import pathlib
from typing import Any

from ml_collections import ConfigDict

from hypjax.config.choices import IN_MEMORY
from hypjax.config.rules import validate_relations
from hypjax.data import opening, photos
from hypjax.data.dataset import Dataset, Decoding
from hypjax.data.splits import HeldOutClasses, Splits
from hypjax.data.tables import write_table
from hypjax.errors import UserError
from hypjax.system.caches import cache_folder

_in_memory: list[Dataset] = []  # The dataset of `register_dataset`, if any.


def register_dataset(dataset: Any, *, skip_corrupt: bool = False) -> dict[str, str | None]:
    """Makes a dataset from Python available to a run; returns the fields of `config.data` to set.

    A dataset of paths becomes a table in a file, which any process can read. Images in memory stay
    in this process; a second dataset replaces the first.
    """
    if isinstance(dataset, str | os.PathLike):
        return {"name": "folder", "path": os.fspath(dataset)}
    images = photos.labelled_images(dataset)
    if images.path(0):  # Then all images are files, not only the first.
        return {"name": "folder", "path": str(write_table(images))}
    _in_memory[:] = [opening.measured(images, skip_corrupt=skip_corrupt)]
    return {"name": IN_MEMORY, "path": None}


def images_in_memory() -> Dataset:
    """The images registered by `register_dataset`; raises `UserError` in another process."""
    if not _in_memory:
        raise UserError("this run's images were in memory; pass them again as dataset=")
    return _in_memory[0]


def open_splits(config: ConfigDict) -> Splits:
    """Opens a run's dataset and the datasets of `eval.benchmarks`.

    Raises `UserError` if a dataset is unknown, not prepared, not readable, or has too few classes.
    """
    data, run = config.data, config.run
    cache_dir = None
    if run.cache == "host":
        cache_dir = pathlib.Path(run.cache_dir or cache_folder() / "decoded").expanduser()
    decoding = Decoding(data.channels, fast=data.decoder == "fast", cache_dir=cache_dir)
    held_out = HeldOutClasses(
        data.test_classes, data.validation_classes, data.split_seed, data.split == "images"
    )
    if data.name == IN_MEMORY:
        opened = opening.open_images("the dataset", images_in_memory(), decoding, held_out)
    elif data.name == "folder":
        opened = opening.open_photos(
            data.path, decoding, held_out, data.exclude, skip_corrupt=data.skip_corrupt
        )
    elif data.name == "features":
        opened = opening.open_features(data.path, data.labels, held_out)
    else:
        opened = opening.open_prepared(data.name, run.data_dir, decoding, held_out)
    benchmarks, distractors = config.eval.benchmarks, config.eval.distractors
    opened = opening.with_benchmarks(opened, benchmarks, decoding, run.data_dir, distractors)
    notes = list(opened.notes)
    if decoding.fast:
        notes.append("decoded by the fast option: pixels differ a little from the protocol's")
    if data.stored_side is not None:
        scaled = f"training images' shorter sides are scaled down to {data.stored_side} pixels"
        notes.append(f"{scaled} before they are cropped: crops are blurrier than the protocol's")
    return opened._replace(notes=tuple(notes))


def fit_to_features(config: ConfigDict) -> ConfigDict:
    """Sets unset sizes of the model, in a copy of the configuration, to the features' dimension."""
    unset = [field for field in ("width", "head_dim") if config.model[field] is None]
    if config.data.name != "features" or not unset:
        return config
    config = config.copy_and_resolve_references()
    dim = photos.read_vectors(config.data.path, config.data.labels).vectors.shape[1]
    config.model.update(dict.fromkeys(unset, dim))
    validate_relations(config)
    return config
