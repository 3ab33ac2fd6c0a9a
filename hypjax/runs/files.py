"""The files of a run: their names, which ones are there, and those in JSON, read with care."""

import contextlib
import json
import os
import pathlib
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hypjax.errors import UserError
from hypjax.system.files import sha256

CONFIG, RESULTS, CHECKPOINTS = "config.json", "results.json", "checkpoints/"
METRICS, TIMES, REPORT = "metrics.jsonl", "times.json", "report.html"
# A published model, whose config.json is timm's: its own configuration, its weights under timm's
# names, and a head that timm's model has not.
PUBLISHED, WEIGHTS, HEAD = "hypjax.json", "model.safetensors", "head.safetensors"
LEARNED = "space"  # In that of a published model: its learned numbers, if it has any.
_LARGEST_LOG = 30.0  # Of a learned number.
MATCHES = "matches.json"  # Distances of matches, by fingerprint of the embeddings.
PROJECTIONS = "projections/"  # Principal components of the models' embeddings.
# Files of a published model whose hashes its configuration holds, besides those of projections.
HASHED = (RESULTS, MATCHES, WEIGHTS, HEAD)
_PROJECTION = re.compile(rf"{PROJECTIONS}(?:head|encoder)-[0-9a-f]{{32}}\.npz")


def steps(folder: pathlib.Path) -> set[str]:
    """Returns the names of the complete checkpoints; the others' names are not numbers."""
    try:
        return {name for name in os.listdir(folder / CHECKPOINTS) if name.isdigit()}
    except OSError:
        return set()


def present(folder: pathlib.Path) -> dict[str, list[int]]:
    """Size in bytes and modification time in ns of a run's files, unless hidden or unfinished."""
    found = {}
    for root, folders, names in os.walk(folder):
        parent = pathlib.Path(root)
        if parent == folder:
            folders[:] = [name for name in folders if name[0] != "."]
            names = [name for name in names if name[0] != "."]
        elif parent == folder / CHECKPOINTS:
            folders[:], names = [name for name in folders if name.isdigit()], []
        for path in (parent / name for name in names if not name.endswith(".unfinished")):
            with contextlib.suppress(FileNotFoundError):  # A checkpoint may be removed meanwhile.
                if not path.is_symlink():
                    stat = path.lstat()
                    found[path.relative_to(folder).as_posix()] = [stat.st_size, stat.st_mtime_ns]
    return found


def is_hashed(name: str) -> bool:
    """Whether a relative path is one of the files whose hashes a published model holds."""
    return name in HASHED or bool(_PROJECTION.fullmatch(name))


def hashed_files(folder: pathlib.Path) -> list[str]:
    """Returns the relative paths of the files in a folder for which `is_hashed` holds."""
    found = [*folder.iterdir(), *(folder / PROJECTIONS).glob("*")]
    return sorted(filter(is_hashed, (path.relative_to(folder).as_posix() for path in found)))


_MOST_CHARACTERS = 2**24


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns the object of some JSON text, unless readers may differ in what they read."""
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError("a name occurs twice in one object")
    return value


def read_object(path: pathlib.Path) -> dict[str, Any] | None:
    """Reads an object from a JSON file of a run; None if there is no file."""
    try:
        if path.exists() and not path.is_file():
            raise UserError(f"cannot read {path} (it is no file)")
        with path.open(encoding="utf-8") as file:
            text = file.read(_MOST_CHARACTERS + 1)
        if len(text) > _MOST_CHARACTERS:
            raise damaged(path, f"it has more than {_MOST_CHARACTERS} characters")
        value = json.loads(text, object_pairs_hook=_unique)
    except UserError:
        raise
    except FileNotFoundError:
        return None
    except NotADirectoryError as error:
        raise UserError(f"{path.parent} is a file; --workdir must name a folder") from error
    except OSError as error:
        raise UserError(f"cannot read {path} ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise damaged(path, str(error)) from error
    if not isinstance(value, dict):
        raise damaged(path, "it holds no object")
    return value


def damaged(path: pathlib.Path, why: str) -> UserError:
    """The error for a file of a run that cannot be used."""
    return UserError(
        f"{path} is damaged ({why}); restore a backup, or name another folder with --workdir"
    )


def is_number(value: Any) -> bool:
    """Whether a value of a JSON file is a number that is no larger than floats can be, or NaN."""
    return type(value) in (int, float) and not abs(value) > sys.float_info.max


def is_published(folder: pathlib.Path) -> bool:
    """Whether a folder holds a published model."""
    return (folder / PUBLISHED).exists()


def require_published(folder: pathlib.Path) -> None:
    """Checks a published model's files against their hashes, which older ones do not have."""
    hashes = (read_object(folder / PUBLISHED) or {}).get("files", {})
    if not isinstance(hashes, dict):
        raise damaged(folder / PUBLISHED, "files is no object")
    for name in hashes and sorted({*hashes, *hashed_files(folder)}):
        path = folder / name
        if is_hashed(name) and not path.exists():
            raise UserError(
                f"{path} is missing, as if a transfer had been cut off; download the model again "
                "with a connection to where it comes from, or push it again"
            )
        try:
            whole = is_hashed(name) and path.is_file() and sha256(path) == hashes.get(name)
        except OSError as error:
            raise UserError(f"cannot read {path} ({error.strerror})") from error
        if not whole:
            raise UserError(
                f"{path} is not the file with which {PUBLISHED} was written; push the model again, "
                "or download all of it again"
            )


def published_numbers(
    folder: pathlib.Path, expected: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """The parameters of a published model's learned numbers, by the names of the expected ones."""
    found = (read_object(folder / PUBLISHED) or {}).get(LEARNED)
    found = found if isinstance(found, dict) else {}
    for name, first in expected.items():
        logs = found.get(name)
        listed = logs if isinstance(logs, list) else [logs]
        numbers = all(is_number(log) and abs(log) <= _LARGEST_LOG for log in listed)
        if not numbers or np.shape(logs) != np.shape(first):
            raise damaged(folder / PUBLISHED, f"{LEARNED} holds no valid {name}")
    return {name: np.float32(found[name]) for name in expected}


def read_results(path: pathlib.Path) -> dict[str, Any] | None:
    """Reads a run's results.json; None if there is none."""
    if is_published(path.parent):
        require_published(path.parent)
    results = read_object(path)
    if results is not None and not _are_results(results):
        raise damaged(path, "it holds no results")
    return results


def _are_results(results: Mapping[str, Any]) -> bool:
    """Whether an object has the form of a run's results, so that its parts can be used."""
    validation, notes = results.get("validation", {}), results.get("notes", [])
    tested = [results.get("untrained"), results.get("final")]
    tested += [results["best"]] if "best" in results else []
    held_out = list(validation.values()) if isinstance(validation, dict) else [None]
    learned = results.get("learned", {})
    return (
        all(map(_are_scores, [*tested, *held_out]))
        and isinstance(learned, dict)
        and all(map(_are_numbers, learned.values()))
        and _fill_tables(tested)
        and _fill_tables(held_out)
        and type(results.get("best_step", 0)) is int
        and isinstance(notes, list)
        and all(isinstance(note, str) for note in notes)
    )


def _are_numbers(learned: Any) -> bool:
    """Whether learned numbers have the form in which results list those of a model."""
    return isinstance(learned, dict) and all(map(is_number, learned.values()))


def _fill_tables(models: Sequence[Mapping[str, Mapping[str, float]]]) -> bool:
    """Whether each row of the tables of scores has the metrics of the first one of its table."""
    first: dict[bool, set[str]] = {}
    for scores in (scores for parts in models for scores in parts.values()):
        rows: dict[str, set[str]] = {}
        for name in scores:
            place, _, metric = name.rpartition("/")
            rows.setdefault(place, set()).add(metric)
        for place, metrics in rows.items():
            if not first.setdefault(bool(place), metrics) <= metrics:
                return False
    return True


def _are_scores(value: Any) -> bool:
    parts = value.values() if isinstance(value, dict) and "head" in value else [None]
    return all(
        isinstance(scores, dict)
        and any(re.fullmatch(r"recall@\d+|.*/.*", name) for name in scores)
        and all(map(is_number, scores.values()))
        for scores in parts
    )
