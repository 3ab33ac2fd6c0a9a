"""The files of a run that the cloud has a copy of, and where they lie on this machine."""

import contextlib
import json
import os
import pathlib
import shutil
from collections.abc import Iterator, Mapping
from typing import Any

from hypjax.system.caches import cache_folder
from hypjax.system.cloud import url_hash
from hypjax.system.files import write_json

CONFIG, RESULTS, CHECKPOINTS = "config.json", "results.json", "checkpoints/"
_STATE = ".mirror.json"


def local_folder(url: str, suffix: str = "") -> pathlib.Path:
    """Where a run in the cloud is kept on this machine."""
    return cache_folder() / "workdirs" / (url_hash(url) + suffix)


def read_state(folder: pathlib.Path) -> dict[str, Any]:
    """What was noted of a local folder; nothing where that is damaged."""
    try:
        return json.loads((folder / _STATE).read_text())
    except (OSError, ValueError):
        return {}


def write_state(folder: pathlib.Path, state: Mapping[str, Any]) -> None:
    """Notes something of a local folder."""
    write_json(folder / _STATE, state)


def entries(folder: pathlib.Path) -> list[pathlib.Path]:
    """What is the run's in its folder."""
    return [path for path in folder.iterdir() if path.name[0] != "."]


def steps(folder: pathlib.Path) -> set[str]:
    """Checkpoints that are complete; others have longer names."""
    try:
        return {name for name in os.listdir(folder / CHECKPOINTS) if name.isdigit()}
    except OSError:
        return set()


def present(folder: pathlib.Path) -> dict[str, list[int]]:
    """Size and time of the run's files, by their names below its folder."""
    found = {}
    for path in _paths(folder):
        with contextlib.suppress(FileNotFoundError):  # A checkpoint may be removed meanwhile.
            facts = path.lstat()
            found[path.relative_to(folder).as_posix()] = [facts.st_size, facts.st_mtime_ns]
    return found


def _paths(folder: pathlib.Path) -> Iterator[pathlib.Path]:
    for root, folders, names in os.walk(folder):
        place = pathlib.Path(root)
        if place == folder:
            folders[:] = [name for name in folders if name[0] != "."]
            names = [name for name in names if name[0] != "."]
        elif place == folder / CHECKPOINTS:
            folders[:], names = [name for name in folders if name.isdigit()], []
        paths = [place / name for name in names if not name.endswith(".unfinished")]
        yield from (path for path in paths if not path.is_symlink())


def link(source: pathlib.Path, target: pathlib.Path) -> None:
    """Gives a file a second name, or copies it where file systems know none."""
    try:
        target.hardlink_to(source)
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copyfile(source, target)


def remove(path: pathlib.Path) -> None:
    """Removes a file or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
