"""Files of features that any model computed, with facts about their images.

An .npz file has the array `features` [n, d] and perhaps `labels` [n], `ids` [n] (paths of images,
or other names), `splits` [n] and `superlabels` [n]. A Parquet table has the
columns `features`, `label`, `path`, `split` and `superlabel`; one that --export=parquet wrote holds
points. An .npy file has the features alone.
"""

import pathlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Float, Shaped

from hypjax.errors import UserError, reason
from hypjax.retrieval import inputs
from hypjax.system.files import read_npz

SUFFIXES = (".npz", ".npy", ".parquet")
_SPACE = b"hypjax.space"  # In the metadata of tables that hold points.
_COLUMNS = {"label": "labels", "path": "ids", "split": "splits", "superlabel": "superlabels"}
_CHECKED = 1 << 16  # Rows that are checked at once.
_LABEL_READERS = {
    ".npy": np.load,
    ".txt": lambda path: np.array([*map(str.strip, path.read_text("utf-8-sig").splitlines())]),
}


class FeatureTable(NamedTuple):
    """Features of any model, and facts about their images."""

    features: Float[np.ndarray, "n d"]  # Finite.
    ids: Shaped[np.ndarray, " n"]  # Names of the images: their paths, or the numbers of the rows.
    labels: Shaped[np.ndarray, " n"]  # Names of their classes; '' if unknown.
    splits: Shaped[np.ndarray, " n"] | None = None
    superlabels: Shaped[np.ndarray, " n"] | None = None


def has_features(path: pathlib.Path) -> bool:
    """Whether a file holds features or points: by its name, or by its columns if it is a table."""
    if path.suffix.lower() != ".parquet":
        return path.suffix.lower() in SUFFIXES
    try:
        import pyarrow.parquet

        schema = pyarrow.parquet.read_schema(path)
        return "features" in schema.names or _SPACE in (schema.metadata or {})
    except Exception:  # Damaged or missing: reading it reports that.
        return False


def feature_table(arrays: Mapping[str, ArrayLike | None], source: str) -> FeatureTable:
    """Checks the arrays of a table by their names; raises `UserError`s that name the source."""
    if "features" not in arrays:
        names = ", ".join(sorted(arrays)) or "none"
        raise UserError(f"{source} has no array features; its arrays are {names}")
    features = np.asarray(arrays["features"])
    if features.ndim != 2 or 0 in features.shape or features.dtype.kind not in "fiu":
        kind = f"{features.dtype} of shape {list(features.shape)}"
        raise UserError(f"features of {source} must be numbers, [images, dimension], not {kind}")
    if features.dtype.kind != "f":
        features = features.astype(np.float32)
    for rows in inputs.blocks(len(features), _CHECKED):
        wrong = np.flatnonzero(~np.isfinite(features[rows]).all(axis=1))
        if len(wrong):
            raise UserError(f"features of {source}: row {rows.start + wrong[0]} is not finite")
    count = len(features)
    columns = {name: as_names(arrays.get(name), name, count, source) for name in _COLUMNS.values()}
    for name, unknown in (("ids", np.arange(count).astype(str)), ("labels", np.full(count, ""))):
        columns[name] = unknown if columns[name] is None else columns[name]
    return FeatureTable(features, **columns)


def as_names(
    column: ArrayLike | None, name: str, count: int, source: str
) -> Shaped[np.ndarray, " n"] | None:
    """Converts labels, ids or other names to strings; None if there are none."""
    if column is None:
        return None
    values = np.asarray(column)
    if values.shape != (count,) or values.dtype.kind not in "iubUO":
        kind = f"{values.dtype} of shape {list(values.shape)}"
        raise UserError(f"{name} of {source} must be {count} whole numbers or strings, not {kind}")
    # Columns of tables with gaps hold whole numbers as floats: 1.0 is class 1.
    whole = [int(x) if isinstance(x, float) and x.is_integer() else x for x in values.tolist()]
    return np.array(["" if value is None else str(value) for value in whole], dtype=str)


def read_arrays(path: pathlib.Path, labels: pathlib.Path | None = None) -> dict[str, np.ndarray]:
    """Reads the arrays of a file, and labels from another one, without executing anything.

    Raises UserError if a file cannot be read, is damaged, or is of another kind.
    """
    readers = {
        ".npz": read_npz,
        ".npy": lambda path: {"features": np.load(path, mmap_mode="r")},
        ".parquet": _read_parquet,
    }
    arrays = _read(path, readers)
    if labels is not None:
        arrays |= {"labels": _read(pathlib.Path(labels).expanduser(), _LABEL_READERS)}
    return arrays


def _read(path: pathlib.Path, readers: Mapping[str, Callable[[pathlib.Path], Any]]) -> Any:
    """Reads a file by its suffix."""
    if (read := readers.get(path.suffix.lower())) is None:
        raise UserError(f"cannot read {path}: its name must end in {', '.join(readers)}")
    try:
        return read(path)
    except Exception as error:  # pyarrow raises almost anything on damaged files.
        raise UserError(f"cannot read {path}: {reason(error)}") from error


def _read_parquet(path: pathlib.Path) -> dict[str, np.ndarray]:
    import pyarrow.parquet

    table = pyarrow.parquet.read_table(path)
    names, facts = table.column_names, table.schema.metadata or {}
    if "features" not in names and _SPACE in facts:  # Of --export=parquet.
        ids, labels = (table.column(name).to_pylist() for name in ("id", "label"))
        return {
            "vectors": _matrix(table, "vector"),
            "ids": np.array(ids, dtype=str),
            "labels": np.array([x or "" for x in labels], dtype=str),
            "space": np.array(facts[_SPACE].decode()),
            "fingerprint": np.array(facts[b"hypjax.fingerprint"].decode()),
        }
    if "features" not in names:
        raise ValueError(f"it has no column features; its columns are {', '.join(names)}")
    columns = {
        name: np.array(table.column(column).to_pylist(), dtype=object)
        for column, name in _COLUMNS.items()
        if column in names
    }
    return {"features": _matrix(table, "features"), **columns}


def _matrix(table: Any, name: str) -> Shaped[np.ndarray, "n d"]:
    """The lists of a column as rows."""
    import pyarrow.compute

    rows = table.column(name).combine_chunks()
    lengths = pyarrow.compute.list_value_length(rows).to_numpy(zero_copy_only=False)
    if len(set(lengths.tolist())) != 1:  # Of a missing list, the length is NaN.
        raise ValueError(f"the lists in the column {name} differ in length")
    return rows.flatten().to_numpy(zero_copy_only=False).reshape(len(rows), -1)
