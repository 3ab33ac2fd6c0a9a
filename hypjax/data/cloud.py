"""Copies prepared datasets from cloud storage (gs://, s3://, or any of fsspec's) to local disk.

Records are read in random order, a few kilobytes at a time, which is slow in object storage.
"""

import pathlib

from hypjax.data.records import MANIFEST, VERSION
from hypjax.errors import UserError
from hypjax.system import console
from hypjax.system.caches import cache_folder
from hypjax.system.cloud import CloudFolder, explained, url_hash
from hypjax.system.files import remove, replacing
from hypjax.system.locks import claimed


def local_copy(url: str, name: str) -> pathlib.Path:
    """Copies a dataset from the data directory at a URL to the cache; returns that directory.

    A copy is never compared with its source again, since a prepared version does not change.
    Raises UserError if the storage has no such dataset, or the cache cannot be written.
    """
    root = cache_folder() / "datasets" / url_hash(url)
    folder, source = root / name / VERSION, f"{url.rstrip('/')}/{name}/{VERSION}"
    if folder.exists():
        return root
    with explained(f"cannot copy {url} to {root}"), claimed(root / name, f"copying {name}"):
        if folder.exists():  # Another process has copied it meanwhile.
            return root
        prepared = CloudFolder(source)
        files = prepared.sizes()
        if MANIFEST not in files:
            raise UserError(
                f"{source} holds no dataset; prepare it on local disk (python -m hypjax.prepare "
                f"--dataset={name}), and copy its whole folder there"
            )
        console.say(f"copying {source} to {folder} (once)")
        for unfinished in folder.parent.glob(f".{VERSION}.*.unfinished"):
            remove(unfinished)  # Of a process that was killed.
        with replacing(folder) as unfinished:
            prepared.get(files, unfinished)
    return root
