"""The files of a run, for the modules that copy them from and to cloud storage."""

import contextlib
import json
import os
import pathlib
import re
import shutil
from collections.abc import Iterator, Mapping
from typing import Any

from hypjax.system.caches import cache_folder
from hypjax.system.cloud import url_hash
from hypjax.system.files import write_json

CONFIG, RESULTS, CHECKPOINTS = "config.json", "results.json", "checkpoints/"
METRICS, TIMES, REPORT = "metrics.jsonl", "times.json", "report.html"
# A published model, whose config.json is timm's: its own configuration, its weights under timm's
# names, and a head that timm's model has not.
PUBLISHED, WEIGHTS, HEAD = "hypjax.json", "model.safetensors", "head.safetensors"
MATCHES = "matches.json"  # Distances of matches, by fingerprint of the embeddings.
PROJECTIONS = "projections/"  # Principal components of the models' embeddings.
# Files of a published model whose hashes its configuration holds, besides those of projections.
HASHED = (RESULTS, MATCHES, WEIGHTS, HEAD)
_PROJECTION = re.compile(rf"{PROJECTIONS}(?:head|encoder)-[0-9a-f]{{32}}\.npz")
_STATE = ".mirror.json"


def local_folder(url: str, suffix: str = "") -> pathlib.Path:
    """Returns the folder on this machine that holds the copy of a run in the cloud."""
    return cache_folder() / "workdirs" / (url_hash(url) + suffix)


def read_state(folder: pathlib.Path) -> dict[str, Any]:
    """Reads the state of a local copy; empty if it is missing or damaged."""
    try:
        state = json.loads((folder / _STATE).read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return state if isinstance(state, dict) else {}


def write_state(folder: pathlib.Path, state: Mapping[str, Any]) -> None:
    """Writes the state of a local copy."""
    write_json(folder / _STATE, state)


def entries(folder: pathlib.Path) -> list[pathlib.Path]:
    """Lists the files and folders of a run, without hidden ones."""
    return [path for path in folder.iterdir() if path.name[0] != "."]


def steps(folder: pathlib.Path) -> set[str]:
    """Returns the names of the complete checkpoints; the others' names are not numbers."""
    try:
        return {name for name in os.listdir(folder / CHECKPOINTS) if name.isdigit()}
    except OSError:
        return set()


def present(folder: pathlib.Path) -> dict[str, list[int]]:
    """Returns [size in bytes, modification time in ns] of a run's files, by relative path."""
    found = {}
    for path in _paths(folder):
        with contextlib.suppress(FileNotFoundError):  # A checkpoint may be removed meanwhile.
            stat = path.lstat()
            found[path.relative_to(folder).as_posix()] = [stat.st_size, stat.st_mtime_ns]
    return found


def _paths(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    for root, folders, names in os.walk(folder):
        parent = pathlib.Path(root)
        if parent == folder:
            folders[:] = [name for name in folders if name[0] != "."]
            names = [name for name in names if name[0] != "."]
        elif parent == folder / CHECKPOINTS:
            folders[:], names = [name for name in folders if name.isdigit()], []
        paths = [parent / name for name in names if not name.endswith(".unfinished")]
        yield from (path for path in paths if not path.is_symlink())


def is_hashed(name: str) -> bool:
    """Whether a relative path is one of the files whose hashes a published model holds."""
    return name in HASHED or bool(_PROJECTION.fullmatch(name))


def hashed_files(folder: pathlib.Path) -> list[str]:
    """Returns the relative paths of the files in a folder for which `is_hashed` holds."""
    found = [*folder.iterdir(), *(folder / PROJECTIONS).glob("*")]
    return sorted(filter(is_hashed, (path.relative_to(folder).as_posix() for path in found)))


def link(source: pathlib.Path, target: pathlib.Path) -> None:
    """Makes a hard link to a file, or a copy if the file system has no hard links."""
    try:
        target.hardlink_to(source)
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copyfile(source, target)


def remove(path: pathlib.Path) -> None:
    """Removes a file or a folder if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
