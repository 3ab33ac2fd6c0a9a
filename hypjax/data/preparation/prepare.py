"""Prepares datasets: lists the published files, checks every image once, and writes records."""

import contextlib
import importlib
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping

from hypjax.catalogue import PREPARED
from hypjax.data import records
from hypjax.data.preparation.official import Listing, OfficialDataset, write_files
from hypjax.data.records import VERSION, RecordFolder
from hypjax.errors import UserError, explained, nearest, writing
from hypjax.system import console
from hypjax.system.caches import cache_folder
from hypjax.system.cloud import CloudFolder, is_url, url_hash
from hypjax.system.files import locked, remove, replacing


def declared(name: str) -> OfficialDataset | Callable[[], records.Contents]:
    """Returns an official dataset, or the function that renders a built-in one."""
    if name not in PREPARED:
        raise UserError(f"no dataset is named {name!r}{nearest(name, PREPARED)}")
    module, _, attribute = PREPARED[name].declaration.partition(".")
    return getattr(importlib.import_module(f"hypjax.data.preparation.{module}"), attribute)


def prepare(
    name: str,
    *,
    data_dir: str | None = None,
    manual_dir: str | None = None,
    part: str | None = None,
    allow_partial: bool = False,
    skip_corrupt: bool = False,
) -> RecordFolder:
    """Prepares a dataset unless it is prepared; arguments are flags of `hypjax.prepare`."""
    root = _root(data_dir)
    if is_url(root):
        raise UserError(f"{root} is not a local folder; prepare {name} in one, and copy it there")
    parts = getattr(declared(name), "parts", {})
    if part is not None and part not in parts:
        advice = f"--part is one of {', '.join(parts)}" if parts else "omit --part"
        raise UserError(f"{name} has no part {part!r}; {advice}")
    chosen = declared(name)
    if isinstance(chosen, OfficialDataset) and part:
        chosen = chosen.parts[part]
    folder = pathlib.Path(root, name, VERSION)
    with _locked(folder, f"preparing {name}") as is_absent:
        already = f"{name} is already prepared; to prepare it again, remove {folder}"
        console.say(f"preparing {name} in {folder} (once)" if is_absent else already)
        if is_absent and isinstance(chosen, OfficialDataset):
            manual = pathlib.Path(manual_dir).expanduser() if manual_dir else None
            downloads = pathlib.Path(root, "downloads", chosen.downloads or name)
            with chosen.open(manual, downloads) as files:
                _check_listing(chosen, files.images, allow_partial)
                with writing(folder), replacing(folder) as unfinished:
                    write_files(unfinished, name, files, part, skip_corrupt=skip_corrupt)
        elif is_absent and not isinstance(chosen, OfficialDataset):
            with writing(folder), replacing(folder) as unfinished:
                records.write_records(unfinished, name, chosen(), None)
    prepared = records.open_folder(name, folder)
    if prepared.part != part:
        problem = f"{folder} holds the part {prepared.part}, not {part} (None is the full dataset)"
        raise UserError(f"{problem}; remove it, or name another folder with --data_dir")
    return prepared


@contextlib.contextmanager
def _locked(folder: pathlib.Path, purpose: str) -> Iterator[bool]:
    """Locks a dataset's folder unless it exists; yields whether it is absent."""
    with contextlib.ExitStack() as stack:
        with writing(folder):  # Not around the body, whose errors have other causes.
            is_absent = not folder.exists()
            if is_absent:
                stack.enter_context(locked(folder.parent, purpose))
                for unfinished in folder.parent.glob(f".{folder.name}.*.unfinished"):
                    remove(unfinished)  # A killed process left it.
                is_absent = not folder.exists()  # Another process may have written it meanwhile.
        yield is_absent


def prepared_folder(name: str, data_dir: str | None) -> RecordFolder:
    """Opens a prepared dataset's folder, at a path or URL; prepares built-in ones if necessary."""
    is_official = isinstance(declared(name), OfficialDataset)
    root = _root(data_dir)
    if is_url(root):
        root = str(_local_copy(root, name))
    folder = pathlib.Path(root, name, VERSION)
    if folder.exists():
        return records.open_folder(name, folder)
    if not is_official:
        return prepare(name, data_dir=root)
    command = f"python -m hypjax.prepare --dataset={name}"
    command += f" --data_dir={root}" if data_dir else ""
    raise UserError(f"{name} is not prepared in {root}; run {command} [--manual_dir=FOLDER]")


def _local_copy(url: str, name: str) -> pathlib.Path:
    """Copies a dataset from a URL to the cache; returns the root folder of the copies."""
    # Random access to a few kilobytes at a time is slow in object storage. A prepared version does
    # not change, so copies are not compared with their source again.
    root = cache_folder() / "datasets" / url_hash(url)
    folder, source = root / name / VERSION, f"{url.rstrip('/')}/{name}/{VERSION}"
    with explained(f"cannot copy {url} to {root}"), _locked(folder, f"copying {name}") as is_absent:
        if is_absent:
            prepared = CloudFolder(source)
            files = prepared.sizes()
            if records.MANIFEST not in files:
                command = f"python -m hypjax.prepare --dataset={name}"
                raise UserError(f"{source} holds no dataset; run {command}, and copy its folder")
            console.say(f"copying {source} to {folder} (once)")
            with replacing(folder) as unfinished:
                prepared.get(files, unfinished)
    return root


def summary(folder: RecordFolder) -> str:
    """Describes a prepared dataset: its folder, a line per split, and notes."""
    lines = [f"{folder.name} is in {folder.path}"]
    for split, (images, classes) in folder.splits.items():
        lines.append(f"  {split:<8}{images:>7} images,{classes:>6} classes")
    return "\n".join([*lines, *(f"  {note}" for note in notes(folder))])


def notes(folder: RecordFolder) -> tuple[str, ...]:
    """Returns remarks for results on a part of a dataset, or on a partial copy."""
    official = _official(folder.name, folder.part)
    if official is None:
        return ()
    return tuple(filter(None, (official.note, folder.note, _partial_copy(official, folder.splits))))


def _official(name: str, part: str | None) -> OfficialDataset | None:
    """Returns an official dataset, or a part of it if named; None for a built-in dataset."""
    official = declared(name)
    if not isinstance(official, OfficialDataset):
        return None
    return official.parts[part] if part else official


def _root(data_dir: str | None) -> str:
    """Returns the folder or URL of all prepared datasets."""
    root = os.fspath(data_dir or os.environ.get("TFDS_DATA_DIR", "~/tensorflow_datasets"))
    return root if is_url(root) else os.path.abspath(os.path.expanduser(root))


def _check_listing(official: OfficialDataset, listing: Listing, allow_partial: bool) -> None:
    """Rejects classes in both train and test and, unless `allow_partial`, incomplete listings."""
    classes = {split: {image.class_name for image in images} for split, images in listing.items()}
    tested = classes.get("test", set()) | classes.get(
        "query", set()
    )  # A gallery may have any class.
    if shared := classes.get("train", set()) & tested:
        raise UserError(f"{min(shared)} is in both train and test, so this is not {official.name}")
    counts = {split: records.Count(len(listing[split]), len(classes[split])) for split in listing}
    if (note := _partial_copy(official, counts)) and not allow_partial:
        raise UserError(f"this is {note}; use --allow_partial; every result will then say so")


def _partial_copy(official: OfficialDataset, counts: Mapping[str, records.Count]) -> str:
    """Describes splits that differ from the published counts; '' if none does."""
    differences = []  # Such as 'train 238 of 5864 images in 4 of 100 classes'.
    for split, expected in official.counts.items():
        images, classes = counts.get(split, records.Count(0, 0))
        classes_differ = expected.classes not in (None, classes)
        if images != expected.images or classes_differ:
            difference = f"{split} {images} of {expected.images} images"
            if images and classes_differ:
                difference += f" in {classes} of {expected.classes} classes"
            differences.append(difference)
    return f"a partial copy of {official.name}: {', '.join(differences)}" if differences else ""
