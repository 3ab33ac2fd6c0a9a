"""Prepared datasets in cloud storage, copied to local disk once: gs://, s3://, whatever fsspec has.

Records are read at random, a few kilobytes at a time, which no object store does fast.
"""

import pathlib
import re
import shutil

from hypjax.errors import UserError
from hypjax.system import console
from hypjax.system.caches import cache_folder
from hypjax.system.cloud import CloudFolder, Stored, copying, reaching, url_hash
from hypjax.system.locks import claimed

# As TFDS names the files of a split's records.
_SHARD = re.compile(
    r"(?P<stem>[^-]+-(?P<split>\w+)\.array_record)-(?P<number>\d+)-of-(?P<count>\d+)"
)


def copies() -> pathlib.Path:
    """The folder that holds all copies."""
    return cache_folder() / "datasets"


def local_copy(url: str, name: str, version: str) -> pathlib.Path:
    """Copies a prepared dataset's folder to the cache, unless it is there already.

    A copy is never compared with its source again: what TFDS prepares under one version stays.

    Args:
        url: The data directory.
        name: The dataset's name.
        version: The version to copy.

    Returns:
        A local data directory that holds the dataset.

    Raises:
        UserError: The storage cannot be reached, holds no such dataset, or the cache cannot be
            written.
    """
    root = copies() / url_hash(url)
    folder = root / name / version
    if not folder.exists():
        prepared, files = _listed(url, f"{name}/{version}")
        with copying(url, root), claimed(root / name, f"copying {name} from {url}"):
            if not folder.exists():
                _copy(prepared, files, folder)
    return root


def _listed(url: str, below: str) -> tuple[CloudFolder, dict[str, Stored]]:
    """A folder below a URL, and the files in it."""
    with reaching(url):
        prepared = CloudFolder(f"{url.rstrip('/')}/{below}")
        files = prepared.list()
    if not files:
        name = below.split("/")[0]
        raise UserError(
            f"{url} holds no {below}; prepare it on local disk (python -m hypjax.prepare "
            f"--dataset={name}) and copy its folder {below} there"
        )
    return prepared, files


def _copy(prepared: CloudFolder, files: dict[str, Stored], folder: pathlib.Path) -> None:
    """Copies files into a folder that appears whole or not at all."""
    unfinished = folder.with_name(f"incomplete.copy_{folder.name}")
    shutil.rmtree(unfinished, ignore_errors=True)  # Of a process that was killed.
    console.say(f"copying {prepared.url} to {folder} (once)")
    try:
        prepared.get_all(files, unfinished)
        _require_whole(prepared.url, unfinished)
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _require_whole(url: str, folder: pathlib.Path) -> None:
    """Refuses a copy of a dataset that is still being uploaded, which would be kept for good."""
    present = {path.name for path in folder.iterdir()}
    wanted = {"dataset_info.json", "features.json"}
    for name in present:
        if shard := _SHARD.fullmatch(name):
            count = int(shard["count"])
            wanted |= {f"{shard['stem']}-{i:05d}-of-{count:05d}" for i in range(count)}
            wanted.add(f"index-{shard['split']}.parquet")
    if missing := wanted - present:
        raise UserError(
            f"{url} is not complete, it lacks {min(missing)}; copy all of the prepared folder there"
        )
