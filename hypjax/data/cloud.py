"""Copies prepared datasets from cloud storage (gs://, s3://, or any of fsspec's) to local disk.

Records are read in random order, a few kilobytes at a time, which is slow in object storage.
"""

import pathlib
import shutil

from hypjax.errors import UserError, redacted
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
    source = f"{redacted(url.rstrip('/'))}/{path}"
    with explained(f"cannot copy {url} to {root}"):
        prepared = CloudFolder(f"{url.rstrip('/')}/{path}")
        files = prepared.sizes()
        if "dataset_info.json" not in files:
            raise UserError(
                f"{source} holds no dataset; prepare it on local disk (python -m hypjax.prepare "
                f"--dataset={name}), and copy its whole folder there"
            )
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
