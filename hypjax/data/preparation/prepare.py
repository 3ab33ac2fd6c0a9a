"""Prepares datasets: lists the published files, checks every image once, and writes records."""

import contextlib
import io
import os
import pathlib
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence

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
from hypjax.data.records import RecordBuilder, damaged, is_prepared, open_records, read_index
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
        raise UserError(
            f"{root} is not a local folder; prepare {name} in one (--data_dir=FOLDER) and copy it "
            "there"
        )
    builder = _open(name, root)
    parts = OFFICIAL_DATASETS[name].parts if name in OFFICIAL_DATASETS else {}
    if part is not None and part not in parts:
        known = f"--part is one of {', '.join(parts)}" if parts else "omit --part"
        raise UserError(f"{name} has no part {part!r}; {known}")
    if is_prepared(builder):
        _accept_prepared(builder, part, allow_partial)
        return builder
    if manual_dir and not isinstance(builder, OfficialBuilder):
        raise UserError(f"{name} is not made from files; omit --manual_dir")
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
        raise UserError(_not_prepared(builder, root, data_dir))
    return _prepare(builder, root, "--config.run.data_dir")


def count(builder: RecordBuilder) -> dict[str, Count]:
    """Counts images and classes in each split of a prepared dataset, from its index."""
    labels = {name: read_index(builder, name, ["label"])["label"] for name in builder.info.splits}
    return {name: Count(len(found), len(found.unique())) for name, found in labels.items()}


def summary(builder: RecordBuilder) -> str:
    """Describes a prepared dataset: its folder, then one line per split."""
    official = _official(builder.name, prepared_part(builder))
    counts, expected = count(builder), official.counts if official else {}
    lines = [f"{builder.name} {builder.version} is in {builder.data_dir}"]
    for name, (images, classes) in counts.items():
        line = f"  {name:<8}{images:>7} images"
        if name not in expected or expected[name].classes != 1:
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
    partial = _describe_partial(official, count(builder))
    return tuple(filter(None, (official.note, partial)))


def prepared_part(builder: RecordBuilder) -> str | None:
    """Name of the part that a prepared dataset is; None if it is the whole."""
    file = pathlib.Path(builder.data_dir, PART)
    part = file.read_text().strip() if file.exists() else None
    if part is not None and part not in OFFICIAL_DATASETS[builder.name].parts:
        raise damaged(builder.name, builder.data_dir, f"{PART} names no part")
    return part


def _official(name: str, part: str | None) -> OfficialDataset | None:
    """Returns an official dataset, or a part of it; None if it is none."""
    whole = OFFICIAL_DATASETS.get(name)
    return whole.parts[part] if whole and part else whole


def _describe_partial(official: OfficialDataset, found: Mapping[str, Count]) -> str | None:
    """Describes what a copy lacks, by the size of each split that has images."""
    expected = official.counts
    found = _comparable(found, expected)
    differing = [split for split in expected if found.get(split, _EMPTY) != expected[split]]
    if not differing:
        return None
    return f"a partial copy of {official.name}: {_compare_counts(expected, found, differing)}"


def _root(name: str, data_dir: str | None) -> str:
    """Returns the folder or URL of prepared datasets, after checking the dataset's name."""
    if name not in BUILDERS:
        raise UserError(f"no dataset is named {name!r}{nearest(name, BUILDERS)}")
    root = os.fspath(data_dir or tfds.core.constants.DATA_DIR)
    return root if is_url(root) else os.path.abspath(os.path.expanduser(root))


def _open(name: str, root: str) -> RecordBuilder:
    """Returns a dataset's builder, prepared or not."""
    try:
        return BUILDERS[name](data_dir=root)
    except Exception as error:  # TFDS raises almost anything on damaged files.
        folder = pathlib.Path(root, name, str(BUILDERS[name].VERSION))
        raise damaged(name, folder, "its description cannot be read") from error


def _not_prepared(builder: RecordBuilder, root: str, data_dir: str | None) -> str:
    option = f" --data_dir={root}" if data_dir else ""
    command = f"python -m hypjax.prepare --dataset={builder.name}{option}"
    names = (path.name for path in pathlib.Path(root, builder.name).glob("*/"))
    if versions := [name for name in names if tfds.core.Version.is_valid(name)]:
        latest = max(versions, key=tfds.core.Version)
        age = "an older" if builder.version > latest else "a newer"
        return (
            f"{builder.name} in {root} was prepared by {age} version of hypjax "
            f"({latest}; this one reads {builder.version}); run {command} again"
        )
    return (
        f"{builder.name} is not prepared in {root}; run {command} "
        "(with --manual_dir=FOLDER where the files cannot be downloaded)"
    )


def _accept_prepared(builder: RecordBuilder, part: str | None, allow_partial: bool) -> None:
    """Rejects a prepared dataset that is damaged, another part, or partial without permission."""
    for split in builder.info.splits:
        open_records(builder, split)
    prepared = prepared_part(builder)
    if prepared != part:
        holds = f"the part {prepared}" if prepared else "the whole dataset"
        raise UserError(
            f"{builder.data_dir} holds {holds}; remove that folder to prepare "
            f"{f'the part {part}' if part else 'the whole'}, or name another with --data_dir"
        )
    official = _official(builder.name, part)
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
        downloads = _downloads(root, name)
        stack.callback(_remove_empty, downloads)
        if is_prepared(builder):  # By another process, while this one waited.
            prepared = _open(name, root)
            _accept_prepared(prepared, part, allow_partial)
            return prepared
        for unfinished in folder.parent.glob(f"incomplete.*_{folder.name}"):
            shutil.rmtree(unfinished, ignore_errors=True)  # TFDS's, of a process that was killed.
        console.say(f"preparing {name} in {folder} (once)")
        if isinstance(builder, OfficialBuilder):
            official = _official(name, part)
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


def _downloads(root: str, name: str) -> pathlib.Path:
    """The folder of a dataset's downloads."""
    source = OFFICIAL_DATASETS[name].source if name in OFFICIAL_DATASETS else None
    return pathlib.Path(root, "downloads", (source and source.downloads) or name)


def _remove_empty(downloads: pathlib.Path) -> None:
    """Removes the folders that TFDS or this module created and left empty."""
    for folder in (downloads.parent / "extracted", downloads, downloads.parent):
        with contextlib.suppress(OSError):
            folder.rmdir()


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
    name, expected = official.name, official.counts
    labels = {split: {image.label for image in part} for split, part in listing.items()}
    counts = {split: Count(len(part), len(labels[split])) for split, part in listing.items()}
    found = _comparable(counts, expected)
    too_large = [
        split
        for split, (images, classes) in found.items()
        if images > expected[split].images or (classes or 0) > (expected[split].classes or 0)
    ]
    if too_large:
        raise UserError(
            f"these files are not a copy of {name}, there are too many: "
            f"{_compare_counts(expected, found, too_large)}; remove those that do not belong to it"
        )
    tested = labels.get("test", set()) | labels.get("query", set())  # A gallery may have both.
    if shared := labels.get("train", set()) & tested:
        raise UserError(
            f"{min(shared)} is in both train and test; these files are not a copy of {name}"
        )
    if (note := _describe_partial(official, found)) and not allow_partial:
        raise UserError(
            f"this is {note}; use --allow_partial to continue; every result will say so"
        )


def _comparable(found: Mapping[str, Count], expected: Mapping[str, Count]) -> dict[str, Count]:
    """The sizes of the expected splits, without the number of classes where it is not known."""
    return {
        split: found[split] if known.classes is not None else Count(found[split].images, None)
        for split, known in expected.items()
        if split in found
    }


def _compare_counts(
    expected: Mapping[str, Count], found: Mapping[str, Count], splits: Sequence[str]
) -> str:
    """Compares counts, as in 'train 238 of 5864 images in 4 of 100 classes, test 0 of 5924'."""
    parts = []
    for split in splits:
        images, classes = found.get(split, _EMPTY)
        text = f"{split} {images} of {expected[split].images}"
        if not parts:
            text += " images"
        if images and classes != expected[split].classes:
            text += f" in {classes} of {expected[split].classes} classes"
        parts.append(text)
    return ", ".join(parts)
