"""Prepares datasets: lists the published files, checks every image once, and writes records."""

import contextlib
import io
import os
import pathlib
import shutil
import time
from collections.abc import Iterator, Mapping

import tensorflow_datasets as tfds

from hypjax.data import cloud
from hypjax.data.preparation.official import (
    PART,
    Count,
    Listing,
    OfficialBuilder,
    OfficialDataset,
)
from hypjax.data.preparation.registry import BUILDERS, OFFICIAL_DATASETS
from hypjax.data.records import RecordBuilder, is_prepared, open_records, read_index, reading
from hypjax.errors import UserError, nearest
from hypjax.system import console
from hypjax.system.cloud import is_url
from hypjax.system.locks import claimed

_EMPTY = Count(0, 0)


def prepare(
    name: str,
    *,
    data_dir: str | None = None,
    manual_dir: str | None = None,
    part: str | None = None,
    allow_partial: bool = False,
    skip_corrupt: bool = False,
) -> RecordBuilder:
    """Prepares a dataset unless it is already prepared, and reports progress.

    The arguments are the flags of `python -m hypjax.prepare`. Raises UserError if there is no such
    dataset or part of it, its files are missing, damaged or of the wrong number, images cannot be
    read, or the folder cannot be written.
    """
    root = _root(name, data_dir)
    if is_url(root):
        raise UserError(f"{root} is not a local folder; prepare {name} in one, and copy it there")
    builder = _open(name, root)
    parts = OFFICIAL_DATASETS[name].parts if name in OFFICIAL_DATASETS else {}
    if part is not None and part not in parts:
        known = f"--part is one of {', '.join(parts)}" if parts else "omit --part"
        raise UserError(f"{name} has no part {part!r}; {known}")
    if manual_dir and not isinstance(builder, OfficialBuilder):
        raise UserError(f"{name} is not made from files; omit --manual_dir")
    if is_prepared(builder):
        _accept_prepared(builder, part, allow_partial)
        return builder
    files = pathlib.Path(manual_dir).expanduser() if manual_dir else None
    return _prepare(builder, root, "--data_dir", files, part, allow_partial, skip_corrupt)


def open_builder(name: str, data_dir: str | None) -> RecordBuilder:
    """Opens a prepared dataset; glyphs, which needs no files, is prepared first if necessary.

    `data_dir` is the folder or cloud URL of prepared datasets; TFDS's default if None. Raises
    UserError if there is no such dataset, or it is not prepared or is damaged.
    """
    root = _root(name, data_dir)
    if is_url(root):
        root = str(cloud.local_copy(root, name, str(BUILDERS[name].VERSION)))
    builder = _open(name, root)
    if is_prepared(builder):
        return builder
    if isinstance(builder, OfficialBuilder):
        option = f" --data_dir={root}" if data_dir else ""
        raise UserError(
            f"{name} is not prepared in {root}; run python -m hypjax.prepare --dataset={name}"
            f"{option} (with --manual_dir=FOLDER where the files cannot be downloaded)"
        )
    return _prepare(builder, root, "--config.run.data_dir")


def count(builder: RecordBuilder) -> dict[str, Count]:
    """Counts images and classes in each split of a prepared dataset, from its index."""
    labels = {name: read_index(builder, name, ["label"])["label"] for name in builder.info.splits}
    return {name: Count(len(found), len(found.unique())) for name, found in labels.items()}


def summary(builder: RecordBuilder) -> str:
    """Describes a prepared dataset: its folder, then one line per split."""
    official = _official(builder.name, prepared_part(builder))
    lines = [f"{builder.name} {builder.version} is in {builder.data_dir}"]
    for name, (images, classes) in count(builder).items():
        line = f"  {name:<8}{images:>7} images"
        if official is None or official.counts[name].classes != 1:
            groups = read_index(builder, name, ["superlabel"])["superlabel"].unique().to_pylist()
            line += f",{classes:>6} classes" + (f" in {len(groups)} groups" if any(groups) else "")
        lines.append(line)
    return "\n".join([*lines, *(f"  {note}" for note in notes(builder))])


def notes(builder: RecordBuilder) -> tuple[str, ...]:
    """What a prepared dataset lacks, for all results computed from it: a part, or a partial copy.

    For example 'a partial copy of cub200: train 238 of 5864 images in 4 of 100 classes'. There is
    none if it is the complete dataset, or one that is not official.
    """
    official = _official(builder.name, prepared_part(builder))
    if official is None:
        return ()
    return tuple(filter(None, (official.note, _describe_partial(official, count(builder)))))


def prepared_part(builder: RecordBuilder) -> str | None:
    """Name of the part that a prepared dataset is; None if it is the whole."""
    file = pathlib.Path(builder.data_dir, PART)
    return file.read_text().strip() if file.exists() else None


def _official(name: str, part: str | None) -> OfficialDataset | None:
    """Returns an official dataset, or a part of it; None if it is none."""
    whole = OFFICIAL_DATASETS.get(name)
    return whole.parts[part] if whole and part else whole


def _root(name: str, data_dir: str | None) -> str:
    """Returns the folder or URL of prepared datasets, after checking the dataset's name."""
    if name not in BUILDERS:
        raise UserError(f"no dataset is named {name!r}{nearest(name, BUILDERS)}")
    root = os.fspath(data_dir or tfds.core.constants.DATA_DIR)
    return root if is_url(root) else os.path.abspath(os.path.expanduser(root))


def _open(name: str, root: str) -> RecordBuilder:
    """Returns a dataset's builder, prepared or not."""
    with reading(name, pathlib.Path(root, name, str(BUILDERS[name].VERSION))):
        return BUILDERS[name](data_dir=root)


def _accept_prepared(builder: RecordBuilder, part: str | None, allow_partial: bool) -> None:
    """Rejects a prepared dataset that is damaged, another part, or partial without permission."""
    for split in builder.info.splits:
        open_records(builder, split)
    prepared, official = prepared_part(builder), _official(builder.name, part)
    if prepared != part:
        raise UserError(
            f"{builder.data_dir} holds the part {prepared}, not {part} (None is the whole); remove "
            "that folder, or name another with --data_dir"
        )
    note = official and _describe_partial(official, count(builder))
    if note and not allow_partial:
        raise UserError(
            f"{builder.data_dir} holds {note}; use it with --allow_partial, or remove that folder "
            "to prepare another"
        )
    console.say(f"{builder.name} is already prepared")


def _prepare(
    builder: RecordBuilder,
    root: str,
    flag: str,
    manual_dir: pathlib.Path | None = None,
    part: str | None = None,
    allow_partial: bool = False,
    skip_corrupt: bool = False,
) -> RecordBuilder:
    """Writes a dataset under a lock; messages name `flag` as what sets the folder."""
    name, folder = builder.name, pathlib.Path(builder.data_dir)
    with contextlib.ExitStack() as stack:
        with _explaining_write_errors(folder, flag):
            stack.enter_context(claimed(folder.parent, f"preparing {name}"))
        if is_prepared(builder):  # By another process, while this one waited.
            return _open(name, root)
        for unfinished in folder.parent.glob(f"incomplete.*_{folder.name}"):
            shutil.rmtree(unfinished, ignore_errors=True)  # TFDS's, of a process that was killed.
        console.say(f"preparing {name} in {folder} (once)")
        official = _official(name, part)
        if official:
            downloads = pathlib.Path(root, "downloads", official.source.downloads or name)
            found = stack.enter_context(official.open(manual_dir, downloads))
            _check_listing(official, found.images, allow_partial)
            builder.found, builder.part, builder.skip_corrupt = found, part, skip_corrupt
        started = time.monotonic()
        with _explaining_write_errors(folder, flag), contextlib.redirect_stdout(io.StringIO()):
            builder.download_and_prepare()
    images = sum(split.num_examples for split in builder.info.splits.values())
    seconds = time.monotonic() - started
    console.say(f"{images} images in {seconds:.0f} s ({images / seconds:.0f} images/s)")
    return _open(name, root)


@contextlib.contextmanager
def _explaining_write_errors(folder: pathlib.Path, flag: str) -> Iterator[None]:
    """Turns errors of writing into a message that names the flag to change."""
    try:
        yield
    except (OSError, RuntimeError) as error:  # ArrayRecord's writer raises the latter.
        reason = getattr(error, "strerror", None) or str(error).split(";")[0]
        raise UserError(
            f"cannot write to {folder} ({reason}); choose another folder with {flag}"
        ) from error


def _check_listing(official: OfficialDataset, listing: Listing, allow_partial: bool) -> None:
    """Rejects a listing that is neither complete nor an accepted partial copy."""
    labels = {split: {image.label for image in part} for split, part in listing.items()}
    found = {split: Count(len(part), len(labels[split])) for split, part in listing.items()}
    compared = ((found[split], expected) for split, expected in official.counts.items())
    if any(a.images > b.images or (b.classes and a.classes > b.classes) for a, b in compared):
        raise UserError(
            f"these files are not a copy of {official.name}, there are too many: "
            f"{_compare(official, found)}; remove those that do not belong to it"
        )
    tested = labels.get("test", set()) | labels.get("query", set())  # A gallery may have both.
    if shared := labels.get("train", set()) & tested:
        raise UserError(
            f"{min(shared)} is in both train and test; these files are not a copy of "
            f"{official.name}"
        )
    if (note := _describe_partial(official, found)) and not allow_partial:
        raise UserError(
            f"this is {note}; use --allow_partial to continue; every result will say so"
        )


def _describe_partial(official: OfficialDataset, found: Mapping[str, Count]) -> str | None:
    """Describes what a copy lacks, by the size of each split that has images."""
    differences = _compare(official, found)
    return f"a partial copy of {official.name}: {differences}" if differences else None


def _compare(official: OfficialDataset, found: Mapping[str, Count]) -> str:
    """Compares counts of splits that differ: 'train 238 of 5864 images in 4 of 100 classes'."""
    parts = []
    for split, expected in official.counts.items():
        images, classes = found.get(split, _EMPTY)
        other_classes = expected.classes not in (None, classes)
        if images == expected.images and not other_classes:
            continue
        text = f"{split} {images} of {expected.images} images"
        if images and other_classes:
            text += f" in {classes} of {expected.classes} classes"
        parts.append(text)
    return ", ".join(parts)
