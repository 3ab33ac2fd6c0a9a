"""Prepared datasets in cloud storage, copied to local disk once: gs://, s3://, whatever fsspec has.

Records are read at random, a few kilobytes at a time, which no object store does fast.
"""

import contextlib
import hashlib
import pathlib
import re
import shutil
from collections.abc import Iterator
from typing import Any

import tqdm

from hypjax import reporting
from hypjax.caches import cache_folder
from hypjax.data.claims import claimed
from hypjax.errors import UserError

# As TFDS names the files of a split's records.
_SHARD = re.compile(
    r"(?P<stem>[^-]+-(?P<split>\w+)\.array_record)-(?P<number>\d+)-of-(?P<count>\d+)"
)


def is_url(data_dir: str) -> bool:
    """Whether a data directory is somewhere else than in this machine's file system."""
    return "://" in data_dir


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
    root = copies() / hashlib.sha256(url.rstrip("/").encode()).hexdigest()[:16]
    folder = root / name / version
    if not folder.exists():
        files, base, sizes = _listed(url, f"{name}/{version}")
        with _copying(url, root), claimed(root / name, f"copying {name} from {url}"):
            if not folder.exists():
                _copy(files, base, sizes, folder)
    return root


def _listed(url: str, below: str) -> tuple[Any, str, dict[str, int]]:
    """The file system, the path of a folder in it, and the sizes of the files in that."""
    with _reaching(url):
        import fsspec

        files, path = fsspec.core.url_to_fs(url)
        base = f"{path.rstrip('/')}/{below}"
        sizes = {name: info["size"] or 0 for name, info in files.find(base, detail=True).items()}
    if not sizes:
        name = below.split("/")[0]
        raise UserError(
            f"{url} holds no {below}; prepare it on local disk (python -m hypjax.prepare "
            f"--dataset={name}) and copy its folder {below} there"
        )
    return files, base, sizes


def _copy(files: Any, base: str, sizes: dict[str, int], folder: pathlib.Path) -> None:
    """Copies files below `base` into a folder that appears whole or not at all."""
    unfinished = folder.with_name(f"incomplete.copy_{folder.name}")
    shutil.rmtree(unfinished, ignore_errors=True)  # Of a process that was killed.
    reporting.say(f"copying {base} to {folder} (once)")
    try:
        with tqdm.tqdm(
            total=sum(sizes.values()), unit="B", unit_scale=True, disable=None, leave=False
        ) as bar:
            for name, size in sizes.items():
                target = unfinished / name[len(base) :].lstrip("/")
                target.parent.mkdir(parents=True, exist_ok=True)
                files.get_file(name, str(target))
                bar.update(size)
        _require_whole(base, unfinished)
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _require_whole(base: str, folder: pathlib.Path) -> None:
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
            f"{base} is not complete, it lacks {min(missing)}; "
            "copy all of the prepared folder there"
        )


@contextlib.contextmanager
def _reaching(url: str) -> Iterator[None]:
    """Tells a user whose storage cannot be read; every driver raises errors of its own."""
    try:
        yield
    except ImportError as error:
        raise UserError(f"cannot read {url} without its driver ({error})") from error
    except Exception as error:
        raise UserError(f"cannot read {url} ({_reason(error)})") from error


@contextlib.contextmanager
def _copying(url: str, root: pathlib.Path) -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"cannot copy {url} to {root} ({_reason(error)})") from error


def _reason(error: Exception) -> str:
    text = getattr(error, "strerror", None) or next(iter(str(error).splitlines()), "")
    return text or type(error).__name__
