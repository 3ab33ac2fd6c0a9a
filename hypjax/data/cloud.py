"""Copies prepared datasets from cloud storage (gs://, s3://, or any of fsspec's) to local disk.

Records are read in random order, a few kilobytes at a time, which is slow in object storage.
"""

import pathlib
import re
import shutil

from hypjax.errors import UserError, redacted
from hypjax.system import console
from hypjax.system.caches import cache_folder
from hypjax.system.cloud import CloudFolder, explained, url_hash
from hypjax.system.locks import claimed

# TFDS's file names of a split's records.
_SHARD = re.compile(r"(?P<stem>[^-]+-(?P<split>\w+)\.array_record)-\d+-of-(?P<count>\d+)")


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
    source = f"{redacted(url.rstrip('/'))}/{path}"
    with explained(f"cannot copy {url} to {root}"):
        prepared = CloudFolder(f"{url.rstrip('/')}/{path}")
        files = prepared.sizes()
        _require_complete(source, set(files), f"python -m hypjax.prepare --dataset={name}")
        with claimed(root / name, f"copying {name} from {url}"):
            if not (root / path).exists():
                console.say(f"copying {source} to {root / path} (once)")
                unfinished = root / name / f"incomplete.copy_{version}"
                try:
                    prepared.get(files, unfinished)
                    unfinished.rename(root / path)
                finally:
                    shutil.rmtree(unfinished, ignore_errors=True)
    return root


def _require_complete(source: str, present: set[str], prepare: str) -> None:
    """Rejects a missing dataset, and one that is still being uploaded."""
    required = {"dataset_info.json", "features.json"}
    for shard in filter(None, map(_SHARD.fullmatch, present)):
        count = int(shard["count"])
        required |= {f"{shard['stem']}-{i:05d}-of-{count:05d}" for i in range(count)}
        required.add(f"index-{shard['split']}.parquet")
    if missing := required - present:
        raise UserError(
            f"{source} lacks {min(missing)}; prepare the dataset on local disk ({prepare}), and "
            "copy its whole folder there"
        )
