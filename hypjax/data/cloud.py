"""Copies prepared datasets from cloud storage (gs://, s3://, or any of fsspec's) to local disk.

Records are read in random order, a few kilobytes at a time, which is slow in object storage.
"""

import pathlib
import shutil

from hypjax.errors import UserError
from hypjax.system import console
from hypjax.system.caches import cache_folder
from hypjax.system.cloud import CloudFolder, explained, url_hash
from hypjax.system.locks import claimed


def local_copy(url: str, name: str, version: str) -> pathlib.Path:
    """Copies a dataset from the data directory at a URL to the cache; returns that directory.

    A copy is never compared with its source again, since a prepared version does not change.
    Raises UserError if the storage has no such dataset, or the cache cannot be written.
    """
    root, path = cache_folder() / "datasets" / url_hash(url), f"{name}/{version}"
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
            console.say(f"copying {prepared.url} to {root / path} (once)")
            unfinished = root / name / f"incomplete.copy_{version}"
            shutil.rmtree(unfinished, ignore_errors=True)  # Left by a killed process.
            prepared.get_all(files, unfinished)
            unfinished.rename(root / path)
    return root
