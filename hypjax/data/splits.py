"""Opens the dataset that a configuration names: a prepared one, or the user's own images.

Modules that import TFDS are imported where they are used: users' own images need none of it.
"""

import dataclasses
import itertools
import pathlib
from typing import NamedTuple

import numpy as np
from ml_collections import ConfigDict

from hypjax.config.choices import DISTRACTORS, GIVEN
from hypjax.config.rules import refuse
from hypjax.data.dataset import Dataset, Decoding, fill_cache, hash_facts, joined, with_host_cache
from hypjax.data.feature_dataset import open_features
from hypjax.data.parts import HeldOutClasses, Splits, check_classes, hold_out, hold_out_validation
from hypjax.data.photo_dataset import open_given, open_photos
from hypjax.errors import UserError
from hypjax.system.caches import cache_folder
from hypjax.types import Judgements


def open_splits(config: ConfigDict) -> Splits:
    """Opens a run's dataset; one that needs no files is prepared first if necessary.

    Raises UserError if it is unknown, is not prepared, cannot be read, or has too few classes.
    """
    data, run = config.data, config.run
    cache_dir = None
    if run.cache == "host":
        cache_dir = pathlib.Path(run.cache_dir or cache_folder() / "decoded").expanduser()
    decoding = Decoding(data.channels, fast=data.decoder == "fast", cache_dir=cache_dir)
    held_out = HeldOutClasses(
        *(data.test_classes, data.validation_classes, data.split_seed), data.split == "images"
    )
    if data.name == "folder":
        splits = open_photos(data.path, decoding, held_out)
    elif data.name == "features":
        splits = open_features(data.path, data.labels, held_out)
    elif data.name == GIVEN:
        splits = open_given(decoding, held_out)
    else:
        splits = _open_prepared(data.name, run.data_dir, decoding, held_out)
    splits = _with_benchmarks(splits, config, decoding)
    notes = [*splits.notes]
    if decoding.fast:
        notes.append("decoded by the fast option: pixels differ a little from the protocol's")
    if data.stored_side is not None:
        notes.append(
            f"training images' shorter sides are scaled down to {data.stored_side} pixels before "
            "they are cropped: crops are blurrier than the protocol's"
        )
    return splits._replace(notes=tuple(notes))


def _with_benchmarks(splits: Splits, config: ConfigDict, decoding: Decoding) -> Splits:
    """Adds the datasets of `eval.benchmarks`, and distractors to all judged galleries."""
    names, judged = config.eval.benchmarks, splits.judgements is not None
    if config.eval.distractors:
        if not names and not judged:
            refuse("eval.distractors", True, "False unless eval.benchmarks names a judged dataset")
        # Joined galleries are not read from the host cache, so they are not decoded into it.
        decoding = dataclasses.replace(decoding, cache_dir=None)
    data_dir, none = config.run.data_dir, HeldOutClasses(0, 0, 0)
    opened = {name: _open_prepared(name, data_dir, decoding, none) for name in names}
    prints = {f"images of {name}": one.fingerprint for name, one in opened.items()}
    tasks, notes = {name: one.task for name, one in opened.items()}, list(splits.notes)
    notes += [note for one in opened.values() for note in one.notes]
    if config.eval.distractors:
        distractors = _open(DISTRACTORS, data_dir, decoding)
        further = distractors.parts["gallery"]
        notes += distractors.notes
        tasks = {
            f"{name}+1m": task._replace(gallery=joined(task.gallery, further))
            for name, task in tasks.items()
        }
        if judged:
            gallery = joined(splits.gallery, further)
            splits = splits._replace(gallery=gallery, name=f"{splits.name}+1m")
    return splits._replace(benchmarks=tasks, further_fingerprints=prints, notes=tuple(notes))


def _open_prepared(
    name: str, data_dir: str | None, decoding: Decoding, held_out: HeldOutClasses
) -> Splits:
    """Opens a prepared dataset; a built-in one is prepared first if necessary.

    If a partial copy has no test images, test classes are held out from the training classes.
    `data_dir` is the folder or cloud URL of prepared datasets; TFDS's default if None.
    """
    opened = _open(name, data_dir, decoding)
    parts, notes = opened.parts, opened.notes
    train, validation, test, gallery = parts.get("train"), None, parts.get("test"), None
    if {"query", "gallery"} <= parts.keys():
        test, gallery = parts["query"], parts["gallery"]
    if train is None and opened.judgements is None:
        raise UserError(f"this copy of {name} has no training images, nor judged queries")
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


class _Opened(NamedTuple):
    """A prepared dataset."""

    parts: dict[str, Dataset]  # By split.
    judgements: Judgements | None  # What its queries should find, if it is judged.
    fingerprint: str  # Hash that differs if any image or relation differs.
    notes: tuple[str, ...]  # Remarks on the copy.


def _open(name: str, data_dir: str | None, decoding: Decoding) -> _Opened:
    """Opens all splits of a prepared dataset, with their relations."""
    from hypjax.data.preparation import prepare
    from hypjax.data.records import JUDGEMENTS, PAIRS, open_records, read_judgements, read_pairs

    builder = prepare.open_builder(name, data_dir)
    parts = {split: open_records(builder, split) for split in builder.info.splits}
    facts = [builder.info.full_name]
    judgements = None
    if PAIRS in builder.TABLES and "train" in parts:
        pairs = read_pairs(builder, parts["train"].names)
        parts["train"] = dataclasses.replace(parts["train"], pairs=pairs)
        facts.append(pairs.tobytes())
    if JUDGEMENTS in builder.TABLES and {"query", "gallery"} <= parts.keys():
        query = parts["query"]
        boxes, judgements = read_judgements(builder, query.names, parts["gallery"].names)
        source = hash_facts([query.source, boxes.tobytes()])
        parts["query"] = dataclasses.replace(query, boxes=boxes, source=source)
        facts += [items.tolist() for items in itertools.chain(*judgements)]
    groups = [part.groups for part in parts.values() if part.groups is not None]
    names = np.unique(np.concatenate(groups)) if groups else None
    for split, part in parts.items():
        facts += [part.labels.tobytes(), part.source]
        if names is not None:  # Groups have the same numbers in all splits.
            numbers = np.searchsorted(names, part.groups)
            part = dataclasses.replace(part, superlabels=numbers, group_names=names)
        parts[split] = with_host_cache(dataclasses.replace(part, fast=decoding.fast), decoding)
    return _Opened(parts, judgements, hash_facts(facts), prepare.notes(builder))
