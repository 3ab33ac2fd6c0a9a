"""The names of a run's files, and readers of its JSON files."""

import contextlib
import json
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from hypjax.errors import UserError, reason
from hypjax.system.files import check_files, check_json

CONFIG, RESULTS, CHECKPOINTS = "config.json", "results.json", "checkpoints/"
METRICS, TIMES, REPORT = "metrics.jsonl", "times.json", "report.html"
STARTS = "run.json"  # Machine, packages and warnings of each start of the run.
# A published model, whose config.json is timm's: hypjax's configuration, weights under timm's
# names, and a head that timm lacks.
PUBLISHED, WEIGHTS, HEAD = "hypjax.json", "model.safetensors", "head.safetensors"
TOWERS = "towers.safetensors"  # Of a published model: the towers beside that of images.
TOKENS = ("tokenizer.json", "bpe_simple_vocab_16e6.txt.gz", "vocab.json", "merges.txt")
CHECKSUMS = "checksums"  # In hypjax.json: SHA-256 hashes of the weights, by file name.
LEARNED = "learned"  # In hypjax.json: logarithms of learned scalars, if there are any.
_LARGEST_LOG = 30.0  # Largest absolute logarithm of a learned scalar.
PROJECTIONS = "projections/"  # Folder of principal components of the models' embeddings.
# Patterns of a published model's files.
MODEL_FILES = (CONFIG, PUBLISHED, RESULTS, WEIGHTS, HEAD, TOWERS, *TOKENS, f"{PROJECTIONS}*.npz")


def read_object(path: pathlib.Path) -> dict[str, Any] | None:
    """Reads a JSON object from a file of a run; None if there is no file."""
    try:
        with damage_explained(path):
            value = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(value, dict):
                raise ValueError("it holds no object")
            return check_json(value) if path.name == PUBLISHED else value
    except FileNotFoundError:
        return None
    except NotADirectoryError as error:
        raise UserError(f"{path.parent} is a file; --workdir must name a folder") from error
    except OSError as error:
        raise UserError(f"cannot read {path} ({error.strerror})") from error


def read_metrics(folder: pathlib.Path) -> list[dict[str, Any]]:
    """Reads the lines of a run's metrics.jsonl; none if there is no file."""
    lines, file = [], folder / METRICS
    for line in file.read_text().splitlines() if file.exists() else ():
        with contextlib.suppress(ValueError):  # A kill may cut off the last line.
            lines.append(json.loads(line))
    return lines


@contextlib.contextmanager
def damage_explained(path: pathlib.Path) -> Iterator[None]:
    """Turns any error on the content of a run's file into a `UserError`: the file is damaged."""
    try:
        yield
    except (OSError, UserError):
        raise
    except Exception as error:
        advice = "restore a backup, or name another run's folder"
        if path.name == RESULTS:
            advice = "remove it: the same command evaluates the run's checkpoints again"
        raise UserError(f"{path} is damaged ({reason(error)}); {advice}") from error


def is_published(folder: pathlib.Path) -> bool:
    """Whether a folder holds a published model."""
    return (folder / PUBLISHED).exists()


def check_weights(folder: pathlib.Path) -> None:
    """Compares a published model's weights with their checksums."""
    expected = (read_object(folder / PUBLISHED) or {}).get(CHECKSUMS, {})
    for path in folder.glob("*.safetensors"):
        with damage_explained(path):
            check_files(folder, {path.name: expected[path.name]})


def published_scalars(
    folder: pathlib.Path, expected: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Reads logarithms of a published model's learned scalars, with expected names and shapes."""
    path = folder / PUBLISHED
    with damage_explained(path):
        saved = (read_object(path) or {}).get(LEARNED, {})
        logs = {name: np.array(saved.get(name), np.float32) for name in expected}  # None is NaN.
        for name, log in logs.items():
            if log.shape != np.shape(expected[name]) or not (np.abs(log) <= _LARGEST_LOG).all():
                raise ValueError(f"{LEARNED} holds no valid {name}")
    return logs
