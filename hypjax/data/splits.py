"""Opens the dataset that a configuration names: a prepared one, or the user's own images."""

import dataclasses
import pathlib
from collections.abc import Iterator

from ml_collections import ConfigDict

from hypjax.config.choices import DISTRACTORS
from hypjax.config.rules import refuse
from hypjax.data import fast_jpeg
from hypjax.data.dataset import Dataset, Decoding, joined
from hypjax.data.parts import HeldOutClasses, Splits, Task
from hypjax.data.photos import open_photos
from hypjax.system.caches import cache_folder


def open_splits(config: ConfigDict) -> Splits:
    """Opens a dataset; one that needs no files is prepared first if necessary.

    Args:
        config: The run's configuration.

    Raises:
        UserError: If the dataset is unknown, is not prepared, cannot be read, or has too few
            classes.
    """
    data, run = config.data, config.run
    cache_dir = None
    if run.cache == "host":
        cache_dir = pathlib.Path(run.cache_dir or cache_folder() / "decoded").expanduser()
    decoding = Decoding(data.channels, fast=data.decoder == "fast", cache_dir=cache_dir)
    held_out = HeldOutClasses(
        *(data.test_classes, data.validation_classes, data.split_seed), data.split == "images"
    )
    if decoding.fast:
        fast_jpeg.require()
    if data.name == "folder":
        splits = open_photos(pathlib.Path(data.path).expanduser(), decoding, held_out)
    else:
        from hypjax.data.prepared import open_prepared  # Imports TFDS.

        splits = open_prepared(data.name, run.data_dir, decoding, held_out)
    splits = _with_benchmarks(splits, config, decoding)
    return splits._replace(notes=(*splits.notes, *_pixel_notes(decoding.fast, data.stored_side)))


def _with_benchmarks(splits: Splits, config: ConfigDict, decoding: Decoding) -> Splits:
    """Adds the datasets of `eval.benchmarks`, and distractors to all judged galleries."""
    names, judged = config.eval.benchmarks, splits.judgements is not None
    if config.eval.distractors:
        if not names and not judged:
            refuse("eval.distractors", True, "False unless eval.benchmarks names a judged dataset")
        # Joined galleries are not read from the host cache, so they are not decoded into it.
        decoding = dataclasses.replace(decoding, cache_dir=None)
    elif not names:
        return splits
    from hypjax.data.prepared import open_gallery, open_prepared  # Imports TFDS.

    data_dir, none = config.run.data_dir, HeldOutClasses(0, 0, 0)
    opened = {name: open_prepared(name, data_dir, decoding, none) for name in names}
    prints = {f"images of {name}": one.fingerprint for name, one in opened.items()}
    tasks, notes = {name: one.task for name, one in opened.items()}, list(splits.notes)
    notes += [note for one in opened.values() for note in one.notes]
    if config.eval.distractors:
        distractors, remarks = open_gallery(DISTRACTORS, data_dir, decoding)
        notes += remarks
        tasks = {f"{name}+1m": _among(task, distractors) for name, task in tasks.items()}
        if judged:
            gallery = joined(splits.gallery, distractors)
            splits = splits._replace(gallery=gallery, name=f"{splits.name}+1m")
    return splits._replace(benchmarks=tasks, further_fingerprints=prints, notes=tuple(notes))


def _among(task: Task, distractors: Dataset) -> Task:
    return task._replace(gallery=joined(task.gallery, distractors))


def _pixel_notes(fast: bool, stored_side: int | None) -> Iterator[str]:
    """Yields how pixels differ from the protocol's."""
    if fast:
        yield "decoded by the fast option: pixels differ a little from the protocol's"
    if stored_side is not None:
        yield (
            f"training images' shorter sides are scaled down to {stored_side} pixels before "
            "they are cropped: crops are blurrier than the protocol's"
        )
