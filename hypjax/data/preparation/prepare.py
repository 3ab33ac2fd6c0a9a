"""Prepares datasets: lists what the authors published, checks every image once, writes records."""

import collections
import contextlib
import io
import os
import pathlib
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence

import tensorflow_datasets as tfds

from hypjax.data import cloud
from hypjax.data.preparation.builders import BUILDERS, Benchmark
from hypjax.data.preparation.checking import CheckedImages, large_images
from hypjax.data.preparation.layouts import LAYOUTS, Count, Listed
from hypjax.data.records import (
    RecordBuilder,
    damaged,
    find_other_versions,
    is_prepared,
    open_records,
    read_index,
)
from hypjax.errors import UserError, nearest
from hypjax.system import console
from hypjax.system.cloud import is_url
from hypjax.system.locks import claimed

_NOTHING = Count(0, 0)


def prepare(
    name: str,
    *,
    data_dir: str | None = None,
    manual_dir: str | None = None,
    allow_partial: bool = False,
    skip_corrupt: bool = False,
) -> RecordBuilder:
    """Prepares a dataset, unless it is prepared already, and says what it does.

    Args:
        name: Of the dataset.
        data_dir: Where datasets lie; None: TFDS's default.
        manual_dir: Where the published files lie; None: they are downloaded, if they can be.
        allow_partial: Whether to take fewer images than the complete dataset has.
        skip_corrupt: Whether to leave out images that cannot be read.

    Returns:
        Its builder, prepared.

    Raises:
        UserError: There is no such dataset, its files are missing, damaged or not as many as they
            should be, images cannot be read, or the folder cannot be written.
    """
    root = _root(name, data_dir)
    if is_url(root):
        raise UserError(
            f"{root} is no folder of this machine; prepare {name} in one (--data_dir=FOLDER), and "
            "copy it there"
        )
    builder = _open(name, root)
    if is_prepared(builder):
        _accept_prepared(builder, allow_partial)
        return builder
    if manual_dir and not isinstance(builder, Benchmark):
        raise UserError(f"{name} is made of no files; leave out --manual_dir")
    return _prepare(
        builder,
        root,
        "--data_dir",
        manual_dir=pathlib.Path(manual_dir).expanduser() if manual_dir else None,
        allow_partial=allow_partial,
        skip_corrupt=skip_corrupt,
    )


def open_builder(name: str, data_dir: str | None) -> RecordBuilder:
    """Opens a prepared dataset; glyphs, which needs no files, is prepared where it is not yet.

    Args:
        name: Of the dataset.
        data_dir: Where datasets lie, possibly in cloud storage; None: TFDS's default.

    Raises:
        UserError: There is no such dataset, or it is not prepared or damaged.
    """
    root = _root(name, data_dir)
    if is_url(root):
        root = str(cloud.local_copy(root, name, str(BUILDERS[name].VERSION)))
    builder = _open(name, root)
    if is_prepared(builder):
        return builder
    if isinstance(builder, Benchmark):
        raise UserError(_not_prepared(builder, root, data_dir))
    return _prepare(builder, root, "--config.run.data_dir")


def count(builder: RecordBuilder) -> dict[str, Count]:
    """Number of images and classes of each split of a prepared dataset, as its index tells.

    Raises:
        UserError: The index is damaged.
    """
    labels = {name: read_index(builder, name, ["label"])["label"] for name in builder.info.splits}
    return {name: Count(len(found), len(found.unique())) for name, found in labels.items()}


def summary(builder: RecordBuilder) -> str:
    """What a prepared dataset holds, a line a split, and where it lies.

    Raises:
        UserError: Its index is damaged.
    """
    counts = count(builder)
    lines = [f"{builder.name} {builder.version} is in {builder.data_dir}"]
    for name, (images, classes) in counts.items():
        groups = read_index(builder, name, ["superlabel"])["superlabel"].unique().to_pylist()
        grouped = f" in {len(groups)} groups" if any(groups) else ""
        lines.append(f"  {name:<8}{images:>7} images,{classes:>6} classes{grouped}")
    note = partial(builder.name, counts)
    return "\n".join([*lines, f"  {note}"] if note else lines)


def partial(name: str, found: Mapping[str, Count]) -> str | None:
    """What a copy of a dataset lacks, in words; None: nothing, or nobody knows.

    Args:
        name: Of the dataset.
        found: What each split has; splits without images may be left out.

    Returns:
        Such as 'a partial copy of cub200: train 238 of 5864 images in 4 of 100 classes'.
    """
    if name not in LAYOUTS:
        return None
    expected = LAYOUTS[name].counts
    differing = [split for split in expected if found.get(split, _NOTHING) != expected[split]]
    if not differing:
        return None
    return f"a partial copy of {name}: {_compared(expected, found, differing)}"


def _root(name: str, data_dir: str | None) -> str:
    """The data directory that is meant, and a check of the dataset's name."""
    if name not in BUILDERS:
        raise UserError(f"no dataset is named {name!r}{nearest(name, BUILDERS)}")
    root = os.fspath(data_dir or tfds.core.constants.DATA_DIR)
    return root if is_url(root) else os.path.abspath(os.path.expanduser(root))


def _open(name: str, root: str) -> RecordBuilder:
    """A dataset's builder, whether it is prepared or not."""
    try:
        return BUILDERS[name](data_dir=root)
    except Exception as error:  # TFDS raises whatever it meets in damaged files.
        folder = pathlib.Path(root, name, str(BUILDERS[name].VERSION))
        raise damaged(name, folder, "its description cannot be read") from error


def _not_prepared(builder: RecordBuilder, root: str, data_dir: str | None) -> str:
    where = f" --data_dir={root}" if data_dir else ""
    command = f"python -m hypjax.prepare --dataset={builder.name}{where}"
    if versions := find_other_versions(builder):
        age = "an older" if builder.version > versions[-1] else "a newer"
        return (
            f"{builder.name} in {root} was prepared by {age} version of hypjax "
            f"({versions[-1]}; this one reads {builder.version}); run {command} again"
        )
    return (
        f"{builder.name} is not prepared in {root}; run {command} "
        "(with --manual_dir=FOLDER where the files cannot be downloaded)"
    )


def _accept_prepared(builder: RecordBuilder, allow_partial: bool) -> None:
    """Refuses a dataset that is damaged, or not what is asked for."""
    for split in builder.info.splits:
        open_records(builder, split)
    note = partial(builder.name, count(builder))
    if note and not allow_partial:
        raise UserError(
            f"{builder.data_dir} holds {note}; use it with --allow_partial, or remove that folder "
            "to prepare another one"
        )
    console.say(f"{builder.name} is prepared already")


def _prepare(
    builder: RecordBuilder,
    root: str,
    flag: str,
    *,
    manual_dir: pathlib.Path | None = None,
    allow_partial: bool = False,
    skip_corrupt: bool = False,
) -> RecordBuilder:
    """Writes a dataset, while no other process does."""
    name, folder = builder.name, pathlib.Path(builder.data_dir)
    with contextlib.ExitStack() as stack:
        with _writing_to(folder, flag):
            stack.enter_context(claimed(folder.parent, f"preparing {name}"))
        if is_prepared(builder):  # By the process that this one has waited for.
            return _open(name, root)
        _remove_unfinished(folder)
        console.say(f"preparing {name} in {folder} (once)")
        if isinstance(builder, Benchmark):
            downloads = pathlib.Path(root, "downloads", name)
            listing = stack.enter_context(LAYOUTS[name].open(manual_dir, downloads))
            _check(name, listing, allow_partial)
            stack.enter_context(large_images())
            reading = stack.enter_context(contextlib.closing(CheckedImages(listing, skip_corrupt)))
            builder.fill(reading)
        started = time.monotonic()
        with _writing_to(folder, flag), contextlib.redirect_stdout(io.StringIO()):
            builder.download_and_prepare()
    with contextlib.suppress(OSError):  # TFDS makes these, and leaves them empty.
        pathlib.Path(root, "downloads", "extracted").rmdir()
        pathlib.Path(root, "downloads").rmdir()
    _tell_of_speed(builder, time.monotonic() - started)
    return _open(name, root)


def _tell_of_speed(builder: RecordBuilder, seconds: float) -> None:
    images = sum(split.num_examples for split in builder.info.splits.values())
    console.say(f"{images} images in {seconds:.0f} s ({images / seconds:.0f} images/s)")


def _remove_unfinished(folder: pathlib.Path) -> None:
    """Removes what processes left that were killed; TFDS writes into such folders."""
    for unfinished in folder.parent.glob(f"incomplete.*_{folder.name}"):
        shutil.rmtree(unfinished, ignore_errors=True)


@contextlib.contextmanager
def _writing_to(folder: pathlib.Path, flag: str) -> Iterator[None]:
    """Tells a user who may not write, or has no space left, what to do."""
    try:
        yield
    except (OSError, RuntimeError) as error:  # ArrayRecord's writer raises the latter.
        reason = getattr(error, "strerror", None) or str(error).split(";")[0]
        raise UserError(
            f"cannot write to {folder} ({reason}); name another folder with {flag}"
        ) from error


def _check(name: str, listing: Mapping[str, Sequence[Listed]], allow_partial: bool) -> None:
    """Refuses a listing that is not that of the complete dataset, or of a part of it."""
    names = collections.Counter(image.name for part in listing.values() for image in part)
    if repeated := [image for image, times in names.items() if times > 1]:
        raise UserError(f"{name} lists {repeated[0]} twice; bring an unchanged copy")
    expected = LAYOUTS[name].counts
    found = {
        split: Count(len(part), len({image.label for image in part}))
        for split, part in listing.items()
    }
    if not names:
        raise UserError(f"there are no images of {name}")
    more = [
        split
        for split, (images, classes) in found.items()
        if images > expected[split].images or classes > expected[split].classes
    ]
    if more:
        raise UserError(
            f"these files are no copy of {name}, they are more: "
            f"{_compared(expected, found, more)}; remove what does not belong to it"
        )
    trained = {image.label for image in listing.get("train", ())}
    others = {image.label for split in listing if split != "train" for image in listing[split]}
    if trained & others:
        raise UserError(
            f"{min(trained & others)} is in both train and test; these files are no copy of {name}"
        )
    if (note := partial(name, found)) and not allow_partial:
        raise UserError(f"this is {note}; use --allow_partial to go on; every result will say so")


def _compared(
    expected: Mapping[str, Count], found: Mapping[str, Count], splits: Sequence[str]
) -> str:
    """Such as 'train 238 of 5864 images in 4 of 100 classes, test 0 of 5924'."""
    told = []
    for split in splits:
        images, classes = found.get(split, _NOTHING)
        text = f"{split} {images} of {expected[split].images}"
        if not told:
            text += " images"
        if images and classes != expected[split].classes:
            text += f" in {classes} of {expected[split].classes} classes"
        told.append(text)
    return ", ".join(told)
