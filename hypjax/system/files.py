"""Atomic writes of small files."""

import json
import os
import pathlib
from typing import Any


def write_json(path: pathlib.Path, value: Any) -> None:
    """Writes a JSON file atomically."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def write_text(path: pathlib.Path, text: str) -> None:
    """Writes a text file atomically: it appears complete or not at all."""
    unfinished = path.with_name(path.name + ".unfinished")
    with unfinished.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())  # Without this, a power failure may leave an empty file.
    unfinished.replace(path)
