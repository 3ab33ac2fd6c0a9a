"""Copies prepared datasets from cloud storage (gs://, s3://, or any of fsspec's) to local disk.

Records are read in random order, a few kilobytes at a time, which is slow in object storage.
"""

import pathlib
import re
import shutil

from hypjax.errors import UserError
from hypjax.system import console
from hypjax.system.caches import cache_folder
from hypjax.system.cloud import CloudFolder, Stored, explained, url_hash
from hypjax.system.locks import claimed

# TFDS's file names of a split's records.
_SHARD = re.compile(
    r"(?P<stem>[^-]+-(?P<split>\w+)\.array_record)-(?P<number>\d+)-of-(?P<count>\d+)"
)


def copies() -> pathlib.Path:
    """Returns the folder of all copies."""
    return cache_folder() / "datasets"


def local_copy(url: str, name: str, version: str) -> pathlib.Path:
    """Copies a dataset from the data directory at a URL to the cache; returns that directory.

    A copy is never compared with its source again, since a prepared version does not change.
    Raises UserError if the storage has no such dataset, or the cache cannot be written.
    """
    root, path = copies() / url_hash(url), f"{name}/{version}"
    if (root / path).exists():
        return root
    with explained(f"cannot read {url}"):
        prepared = CloudFolder(f"{url.rstrip('/')}/{path}")
        files = prepared.list()
    if not files:
        raise UserError(
            f"{url} holds no {path}; prepare it on local disk (python -m hypjax.prepare "
            f"--dataset={name}) and copy its folder {path} there"
        )
    failed, copying = f"cannot copy {url} to {root}", f"copying {name} from {url}"
    with explained(failed), claimed(root / name, copying):
        if not (root / path).exists():
            _copy(prepared, files, root / path)
    return root


def _copy(prepared: CloudFolder, files: dict[str, Stored], folder: pathlib.Path) -> None:
    """Copies files into a folder that appears only when complete."""
    unfinished = folder.with_name(f"incomplete.copy_{folder.name}")
    shutil.rmtree(unfinished, ignore_errors=True)  # Left by a killed process.
    console.say(f"copying {prepared.url} to {folder} (once)")
    try:
        prepared.get_all(files, unfinished)
        _require_complete(prepared.url, unfinished)
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _require_complete(url: str, folder: pathlib.Path) -> None:
    """Rejects an incomplete copy, as of a dataset that is still being uploaded."""
    present = {path.name for path in folder.iterdir()}
    required = {"dataset_info.json", "features.json"}
    for name in present:
        if shard := _SHARD.fullmatch(name):
            count = int(shard["count"])
            required |= {f"{shard['stem']}-{i:05d}-of-{count:05d}" for i in range(count)}
            required.add(f"index-{shard['split']}.parquet")
    if missing := required - present:
        raise UserError(
            f"{url} is incomplete, it lacks {min(missing)}; copy the whole prepared folder there"
        )
