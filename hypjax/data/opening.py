"""Opens prepared and users' own datasets as training, validation and test images."""

import collections
import concurrent.futures
import contextlib
import dataclasses
import itertools
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from hypjax.catalogue import PREPARED
from hypjax.data import photos, pixels
from hypjax.data.captions import with_captions
from hypjax.data.dataset import Dataset, Decoding, decoded_as, fill_cache, fingerprint_of, stacked
from hypjax.data.fetching import local_path
from hypjax.data.repeats import with_repeats
from hypjax.data.splits import NOTES, HeldOutClasses, Splits, check_classes, divide
from hypjax.errors import UserError, counted, reason
from hypjax.system import console
from hypjax.system.caches import cache_folder
from hypjax.system.files import checksum, replacing
from hypjax.system.machine import usable_cores
from hypjax.system.progress import Bar
from hypjax.types import SPLITS

# The dataset whose images join galleries as distractors.
(DISTRACTORS,) = (name for name, facts in PREPARED.items() if facts.role == "distractors")
_MAX_NAMED = 5  # Files that a message names.
_EXACT, _NOTHING_HELD_OUT = Decoding(), HeldOutClasses()


def open_prepared(
    name: str,
    data_dir: str | None = None,
    decoding: Decoding = _EXACT,
    held_out: HeldOutClasses = _NOTHING_HELD_OUT,
    captions: str | None = None,
    *,
    captioned: bool = False,
) -> Splits:
    """Opens a prepared dataset in a folder or at a URL; prepares a built-in one if necessary.

    A file of `captions` replaces the dataset's own, see `hypjax.data.captions.with_captions`;
    unless `captioned`, there are none.
    """
    tables, fields = _open_tables(name, data_dir, decoding)
    if captions is not None:
        tables = {split: with_captions(images, captions) for split, images in tables.items()}
    if not captioned:
        tables = {x: dataclasses.replace(images, captions=None) for x, images in tables.items()}
    if "train" not in tables and fields["ground_truth"] is None:
        raise UserError(f"this copy of {name} has neither training images nor ground truth")
    splits = divide(f"this copy of {name}", tables, held_out, **fields)
    if "test" not in tables and splits.gallery is None:  # The copy is partial.
        note = f"tested on {splits.test.num_classes} of the training classes, held out"
        splits = splits._replace(notes=(*splits.notes, *(NOTES[held_out.split] or (note,))))
    elif held_out.test:
        raise UserError(f"config.data.test_classes must be 0: {name} has its own test classes")
    check_classes(name, splits)
    for images in tables.values():
        fill_cache(images, decoding.channels)
    return with_repeats(splits)


def with_benchmarks(
    splits: Splits,
    names: Sequence[str],
    decoding: Decoding,
    data_dir: str | None,
    distractors: bool,
) -> Splits:
    """Adds further datasets with ground truth, and distractors to galleries with ground truth."""
    if distractors:
        if not names and splits.ground_truth is None:
            raise UserError("config.eval.distractors needs a dataset in eval.benchmarks")
        # Stacked galleries cannot be read from the host cache, so they are not decoded into it.
        decoding = dataclasses.replace(decoding, cache_dir=None)
    datasets = [splits, *(open_prepared(name, data_dir, decoding) for name in names)]
    notes = [note for dataset in datasets for note in dataset.notes]
    if distractors:
        tables, fields = _open_tables(DISTRACTORS, data_dir, decoding)
        notes += fields["notes"]
        for i, dataset in enumerate(datasets):
            if dataset.ground_truth is not None and dataset.gallery is not None:
                gallery = stacked([dataset.gallery, tables["gallery"]])
                datasets[i] = dataset._replace(gallery=gallery, name=f"{dataset.name}+1m")
    return datasets[0]._replace(benchmarks=datasets[1:], notes=tuple(notes))


def _open_tables(
    name: str, data_dir: str | None, decoding: Decoding
) -> tuple[dict[str, Dataset], dict[str, Any]]:
    """Opens a prepared dataset: its tables by split, and further fields of its `Splits`."""
    from hypjax.data import records
    from hypjax.data.preparation import prepare
    from hypjax.data.records import CAPTIONS, JUDGEMENTS, PAIRS

    folder = prepare.prepared_folder(name, data_dir)
    tables = {split: records.open_records(folder, split) for split in folder.splits}
    hashed: list[object] = [name]
    ground_truth = None
    if PAIRS in folder.tables and "train" in tables:
        pairs = records.read_pairs(folder, tables["train"].names)
        tables["train"] = dataclasses.replace(tables["train"], pairs=pairs)
        hashed.append(pairs.tobytes())
    if JUDGEMENTS in folder.tables and {"query", "gallery"} <= tables.keys():
        queries = tables["query"]
        boxes, ground_truth = records.read_judgements(
            folder, queries.names, tables["gallery"].names
        )
        records_fingerprint = fingerprint_of([queries.records_fingerprint, boxes.tobytes()])
        tables["query"] = dataclasses.replace(
            queries, boxes=boxes, records_fingerprint=records_fingerprint
        )
        hashed += [items.tolist() for items in itertools.chain.from_iterable(ground_truth)]
    if CAPTIONS in folder.tables:
        texts = records.read_captions(folder)
        for split, images in tables.items():
            column = np.empty(len(images), object)
            column[:] = [texts.get(name, ()) for name in images.class_names]
            tables[split] = dataclasses.replace(images, captions=column)
    for split, images in tables.items():
        hashed += [images.labels.tobytes(), images.records_fingerprint]
        tables[split] = decoded_as(images, decoding)
    fields = {"notes": prepare.notes(folder), "ground_truth": ground_truth, "name": name}
    return tables, {"fingerprint": fingerprint_of(hashed), **fields}


def open_photos(
    where: str,
    decoding: Decoding,
    held_out: HeldOutClasses,
    exclude: Sequence[str] = (),
    *,
    skip_corrupt: bool = False,
    list_images: Callable[..., Dataset] = photos.list_images,
) -> Splits:
    """Opens images at a location, see `list_images`; holds out classes if there are no splits."""
    images = list_images(where, exclude=exclude, skip_corrupt=skip_corrupt)
    if images.vectors is not None:
        raise UserError(f"{where} holds features; use --config=configs/features.py")
    labelled = np.flatnonzero(images.class_names != "")
    if not len(labelled):
        advice = "name a folder with a sub-folder for each class, or a table with path and label"
        is_alone = len(images) == 1 and local_path(where).is_file()
        problem = f"{where} is a single image" if is_alone else f"no image of {where} has a class"
        raise UserError(f"{problem}; {advice}")
    root = local_path(where)
    if not root.is_dir():
        root = root.parent
    elif len(labelled) < len(images):
        unlabelled = images.names[images.class_names == ""]
        first = f"the first is {unlabelled[0]}"
        console.say(f"images without a class are left out: {len(unlabelled)} ({first})")
        images = images.take(labelled)
    images = measured(images, root, skip_corrupt=skip_corrupt)
    return open_images(where, images, decoding, held_out)


def open_features(
    path: str,
    labels: str | None,
    held_out: HeldOutClasses,
    read: Callable[[str, str | None], Dataset] = photos.read_vectors,
) -> Splits:
    """Opens a file of features, and optionally a file of their labels, as a dataset."""
    images = read(path, labels)
    return _split(path, images, images.fingerprint, held_out)


def measured(
    images: Dataset, root: pathlib.Path = pathlib.Path(), *, skip_corrupt: bool = False
) -> Dataset:
    """Fills in sizes, checksums and `records_fingerprint`, for which all images are decoded once.

    Images that cannot be read raise a UserError, or are left out if `skip_corrupt`. The hash
    `records_fingerprint` contains the images' names relative to `root`.
    """
    measurements, reasons = _measure(images)
    if reasons:
        named = [f"{images.name(i)} ({reason})" for i, reason in reasons.items()][:_MAX_NAMED]
        problem = f"cannot read {len(reasons)} of {len(images)} images: {'; '.join(named)}"
        if not skip_corrupt or len(reasons) == len(images):
            raise UserError(f"{problem}; fix them, or set --config.data.skip_corrupt=True")
        console.warn(f"{problem}; left out")
        readable = np.setdiff1d(np.arange(len(images)), [*reasons])
        images, measurements = images.take(readable), measurements[readable]
    names = [os.path.relpath(name, root) for name in images.names]
    columns = (images.class_names, images.splits, images.coarse_labels, measurements)
    rows = zip(names, *(x.tolist() for x in columns if x is not None), strict=True)
    sizes, checksums = measurements[:, :2].astype(np.int32), measurements[:, 2]
    return dataclasses.replace(
        images, sizes=sizes, checksums=checksums, records_fingerprint=fingerprint_of(rows)
    )


def open_images(
    where: str, images: Dataset, decoding: Decoding, held_out: HeldOutClasses
) -> Splits:
    """Splits measured images and fills their cache; holds out classes if there are no splits."""
    images = decoded_as(images, decoding)
    splits = _split(where, images, str(images.records_fingerprint), held_out)
    fill_cache(images, decoding.channels)
    columns = images.class_names, images.splits, images.coarse_labels, images.checksums
    rows = zip(*(x.tolist() for x in columns if x is not None), strict=True)
    return splits._replace(content_fingerprint=fingerprint_of(rows))


def _split(where: str, images: Dataset, fingerprint: str, held_out: HeldOutClasses) -> Splits:
    """Splits images by their column of splits, or holds out classes or images."""
    unlabelled = np.flatnonzero(images.class_names == "")
    if len(unlabelled):
        example = f"row {unlabelled[0]} ({images.name(unlabelled[0])})"
        raise UserError(
            f"{where} has {len(unlabelled)} rows without a class, such as {example}; leave them "
            "out, or give classes as a table's column label, as ?label=COLUMN of a dataset, or for "
            "features as the array labels or the file --config.data.labels"
        )
    table, images = images, images.whole()  # Boxes are trained on if their images are.
    photos.check_columns(where, images)
    tables = {"train": images}
    if held_out.split == "none":  # Images of all splits train.
        tables = {"train": dataclasses.replace(images, splits=None)}
    elif images.splits is not None:
        present = np.unique(images.splits).tolist()
        if {*present} - {"validation"} not in ({"train", "test"}, {"train", "query", "gallery"}):
            needed = "train, and either test or both query and gallery"
            problem = f"{counted(len(present), 'split')} ({', '.join(present)}); it needs {needed}"
            remedy = "set --config.data.split=none to train on all images without a test"
            raise UserError(f"{where} has {problem}, or {remedy}")
        tables = {split: images.take(np.flatnonzero(images.splits == split)) for split in present}
        _warn_of_overlap(where, tables)
    notes = NOTES[held_out.split]
    splits = divide(where, tables, held_out, fingerprint=fingerprint, notes=notes)
    check_classes(where, splits)
    return _with_boxes(with_repeats(splits), table)


def _with_boxes(splits: Splits, table: Dataset) -> Splits:
    """Adds the boxes of training images, in a table of images and boxes, after the images."""
    if table.owners is None or splits.train is None:
        return splits
    row_of = {name: row for row, name in enumerate(table.names)}
    images = [row_of[name] for name in splits.train.names]
    chosen, pairs = {*splits.train.names}, zip(table.owners, table.names, strict=True)
    boxes = [row for row, (owner, name) in enumerate(pairs) if owner != name and owner in chosen]
    rows = np.array([*images, *boxes])
    return splits._replace(train=table.take(rows).renumbered())


def _warn_of_overlap(where: str, tables: dict[str, Dataset]) -> None:
    """Warns of classes in more than one of training, validation and test images."""
    # By class; a dict keeps the order of splits.
    splits_of: dict[str, dict[str, bool]] = collections.defaultdict(dict)
    for split in filter(tables.__contains__, SPLITS):
        for name in tables[split].class_names:
            splits_of[name]["test" if split in ("query", "gallery") else split] = True
    shared = {name: ", ".join(splits) for name, splits in splits_of.items() if len(splits) > 1}
    if shared:
        classes, example = counted(len(shared), "class"), f"{min(shared)} ({shared[min(shared)]})"
        console.warn(f"{where} has {classes} in more than one split, such as {example}")


def _measure(images: Dataset) -> tuple[Int[np.ndarray, "images 3"], dict[int, str]]:
    """Returns heights, widths and checksums, 0 for unreadable images, and the reasons by row."""
    versions = [""] if images.file_versions is None else images.file_versions.tolist()
    cache = cache_folder() / "measured" / f"{fingerprint_of(versions)}.npz"
    in_memory = not versions[0]
    measurements = np.zeros((len(images), 3), np.int64)
    reasons: dict[int, str] = {}
    if not in_memory and os.path.exists(cache):  # Unlike Path.exists, never a PermissionError.
        with contextlib.suppress(Exception):  # Damaged: unlike an .npy file, it has checksums.
            measurements = np.load(cache)["measurements"]
    rows = np.flatnonzero(measurements[:, 0] == 0).tolist()  # New and formerly unreadable images.
    if not rows:
        return measurements, reasons
    again = " that could not be read before" if len(rows) < len(images) else ""
    console.say(f"checking {counted(len(rows), 'image')}{again}")
    with concurrent.futures.ThreadPoolExecutor(usable_cores()) as pool:
        outcomes = pool.map(lambda row: _measure_file(images, row), rows)
        outcomes = Bar(outcomes, total=len(rows), unit="image", disable=None, leave=False)
        for row, outcome in zip(rows, outcomes, strict=True):
            if isinstance(outcome, str):
                reasons[row] = outcome
            else:
                measurements[row] = outcome
    if not in_memory:
        with console.tolerating(f"the sizes of the images ({cache})"):
            cache.parent.mkdir(parents=True, exist_ok=True)
            with replacing(cache) as temporary, temporary.open("wb") as file:
                np.savez(file, measurements=measurements)
    return measurements, reasons


def _measure_file(images: Dataset, i: int) -> tuple[int, int, int] | str:
    """Returns height, width and checksum of an image, or why it cannot be read."""
    try:
        content = images.content(i)
        image = pixels.decode(content, channels=3, upright=True)
    except Exception as error:  # Decoders raise almost anything on damaged files.
        return reason(error)
    content = content if isinstance(content, bytes) else image.tobytes()
    return image.height, image.width, checksum(content)
