"""Opens datasets by name: prepared ones, and the user's own images or features.

Users' own images need nothing of what reads records, which is imported where it is used.
"""

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np

from hypjax.catalogue import PREPARED
from hypjax.data.dataset import Dataset, Decoding, fill_cache, hash_facts, stacked, with_host_cache
from hypjax.data.parts import (
    NOTHING_HELD_OUT,
    SAME_CLASSES,
    HeldOutClasses,
    Splits,
    check_classes,
    divide,
)
from hypjax.data.photo_dataset import open_features, open_photos
from hypjax.errors import UserError

# A gallery without queries.
(DISTRACTORS,) = (name for name, facts in PREPARED.items() if facts.role == "distractors")
_EXACT = Decoding(channels=3, fast=False, cache_dir=None)


def open_dataset(
    name: str,
    decoding: Decoding,
    *,
    held_out: HeldOutClasses = NOTHING_HELD_OUT,
    path: str | None = None,
    labels: str | None = None,
    data_dir: str | None = None,
) -> Splits:
    """Opens a prepared dataset, or the 'folder' or 'features' of the user's at a path.

    Datasets that need no files are prepared first if necessary. `labels` is a file with the classes
    of features; `data_dir` is the folder or URL of prepared datasets. Test
    classes are held out only if there are no test images. Raises UserError if the dataset is
    unknown, is not prepared, cannot be read, or has too few classes.
    """
    if name == "folder":
        return open_photos(path, decoding, held_out)
    if name == "features":
        return open_features(path, labels, held_out)
    parts, known = _open(name, data_dir, decoding)
    if "train" not in parts and known.judgements is None:
        raise UserError(f"this copy of {name} has no training images, nor judged queries")
    train, validation, test, gallery = divide(f"this copy of {name}", parts, held_out)
    splits = known._replace(train=train, validation=validation, test=test, gallery=gallery)
    if "test" not in parts and gallery is None:  # Of a partial copy.
        note = f"tested on {test.num_classes} of the training classes, held out"
        note = SAME_CLASSES if held_out.images else note
        splits = splits._replace(notes=(*splits.notes, note))
    elif held_out.test:
        raise UserError(
            f"config.data.test_classes is {held_out.test!r}; it must be 0: {name} has its own test "
            "classes"
        )
    check_classes(name, splits)
    for part in parts.values():
        fill_cache(part, decoding.channels)
    return splits


def open_prepared(name: str, data_dir: str | None = None) -> Splits:
    """Opens a prepared dataset by its name, as published: no class is held out."""
    if name in ("folder", "features"):
        raise UserError(
            f"--dataset is {name}, which is not a prepared dataset; give your own files"
        )
    return open_dataset(name, _EXACT, data_dir=data_dir)


def with_benchmarks(
    splits: Splits,
    names: Sequence[str],
    decoding: Decoding,
    *,
    distractors: bool = False,
    data_dir: str | None = None,
) -> Splits:
    """Adds judged datasets to score, and distractors to all judged galleries.

    Raises UserError if there are distractors, but no judged gallery.
    """
    judged = splits.judgements is not None
    if distractors:
        if not names and not judged:
            raise UserError(
                "config.eval.distractors is True; it must be False unless eval.benchmarks names a "
                "judged dataset"
            )
        # Joined galleries are not read from the host cache, so they are not decoded into it.
        decoding = dataclasses.replace(decoding, cache_dir=None)
    opened = {name: open_dataset(name, decoding, data_dir=data_dir) for name in names}
    prints = {f"images of {name}": one.fingerprint for name, one in opened.items()}
    tasks, notes = {name: one.task for name, one in opened.items()}, list(splits.notes)
    notes += [note for one in opened.values() for note in one.notes]
    if distractors:
        parts, known = _open(DISTRACTORS, data_dir, decoding)
        further = parts["gallery"]
        notes += known.notes
        tasks = {
            f"{name}+1m": task._replace(gallery=stacked([task.gallery, further]))
            for name, task in tasks.items()
        }
        if judged:
            gallery = stacked([splits.gallery, further])
            splits = splits._replace(gallery=gallery, name=f"{splits.name}+1m")
    return splits._replace(benchmarks=tasks, further_fingerprints=prints, notes=tuple(notes))


def _open(name: str, data_dir: str | None, decoding: Decoding) -> tuple[dict[str, Dataset], Splits]:
    """Opens a prepared dataset: its tables by split, and what else is known of its `Splits`."""
    from hypjax.data.preparation import prepare
    from hypjax.data.records import JUDGEMENTS, PAIRS, open_records, read_judgements, read_pairs

    folder = prepare.open_prepared(name, data_dir)
    parts = {split: open_records(folder, split) for split in folder.splits}
    facts = [name]
    judgements = None
    if PAIRS in folder.tables and "train" in parts:
        pairs = read_pairs(folder, parts["train"].names)
        parts["train"] = dataclasses.replace(parts["train"], pairs=pairs)
        facts.append(pairs.tobytes())
    if JUDGEMENTS in folder.tables and {"query", "gallery"} <= parts.keys():
        query = parts["query"]
        boxes, judgements = read_judgements(folder, query.names, parts["gallery"].names)
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
    notes, empty = prepare.notes(folder), (None, None, None, None)
    return parts, Splits(*empty, hash_facts(facts), notes, judgements, name)
