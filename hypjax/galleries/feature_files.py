"""Files of features of any model, with labels, paths and splits of their images.

An .npz or .h5 file has the array `features` [n, d] and optional arrays `labels` [n], `ids` [n]
(paths of images, or other names), `splits` [n] and `coarse_labels` [n]; a .pt file has a dict of
such tensors or lists. A .parquet, .csv or .tsv table has numbered columns such as f0 and f1, or, if
it is .parquet, the column `features`; and optional columns `label`, `path`, `split` and
`coarse_label`. Options name other arrays or columns, as in features.h5?features=emb&label=y, see
`hypjax.system.columns`. An .npy file and a .pt file of one tensor have only features. A .pt file of
(x, y) or (x, y, index), as the code of Hyp-ViT, HypMix and HIER writes it, holds points x with
labels y.
"""

import collections
import os
import pathlib
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Float, Shaped

from hypjax.errors import UserError, counted, explained, require_package
from hypjax.retrieval import inputs
from hypjax.system import console, files
from hypjax.system.columns import Options, find_column, require_options, split_options
from hypjax.types import MISSING, class_name, one_spelling, split_names

IN_SPACE = "in_space"  # Array that marks features as points of a space that the file does not name.
_OPTIONS = ("features", "path", "label", "coarse_label")
_INDEX = re.compile(r"|unnamed: \d+|__index_level_\d+__")  # Index columns of pandas; '' in CSV.
Column = ArrayLike | Sequence[str]  # An array, or what NumPy makes one of.
_CHECKED_ROWS = 1 << 13  # Rows that are checked at once.


class FeatureTable(NamedTuple):
    """Features of any model, with names and classes of their images."""

    features: Float[np.ndarray, "n d"]  # Finite.
    ids: Shaped[np.ndarray, " n"]  # Names of the images: paths, or row numbers.
    labels: Shaped[np.ndarray, " n"]  # Names of the images' classes; '' if unknown.
    splits: Shaped[np.ndarray, " n"] | None = None
    coarse_labels: Shaped[np.ndarray, " n"] | None = None


_ROLES = ("features", "path", "label", "split", "coarse_label")  # Of the fields above.


def has_features(path: pathlib.Path, options: Options) -> bool:
    """Whether a file holds features, by its name, or by the columns of a table."""
    suffix = path.suffix.lower()
    if suffix not in (".parquet", ".csv", ".tsv"):  # These may be tables of images.
        return suffix in _READERS
    try:
        if suffix == ".parquet":
            import pyarrow.parquet

            schema = pyarrow.parquet.read_schema(path)
            names, holds_lists = schema.names, "binary" not in str(schema.types)  # And no images.
        else:
            names, holds_lists = files.csv_header(path)[1], False
        columns = _columns_of_arrays(names := files.column_names(names), options, path)
    except Exception:  # Damaged or missing: reading it reports that.
        return False
    if "features" in {*options, *names} or _numbered_columns(names, columns):
        return True
    return holds_lists and "features" in columns and "ids" not in columns


def _numbered_columns(names: Sequence[str], columns: Mapping[str, str]) -> list[str]:
    """Columns of features: all columns of no known use, if numbered from 0 or 1; else none."""
    known = columns.values()
    unknown = {name for name in names if name not in known and not _INDEX.fullmatch(name)}
    stem = min(unknown, default="").rstrip("0123456789")
    for first in (0, 1):
        numbered = [f"{stem}{number}" for number in range(first, first + len(unknown))]
        if unknown == set(numbered):
            return numbered
    return []


def feature_table(arrays: Mapping[str, Column | None], source: str) -> FeatureTable:
    """Checks named arrays and makes a table of them; a `UserError` names the source."""
    if (raw := arrays.get("features")) is None:
        names = ", ".join(sorted(arrays)) or "none"
        raise UserError(f"{source} has no array features; name one by ?features=ARRAY ({names})")
    features = inputs.unmasked(f"features of {source}", raw)
    if features.ndim != 2 or 0 in features.shape or features.dtype.kind not in "fiu":
        kind = f"{features.dtype} of shape {list(features.shape)}"
        raise UserError(f"features of {source} must be numbers, [images, dimension], not {kind}")
    features = features if features.dtype.kind == "f" else features.astype(np.float32)
    for rows in inputs.blocks(len(features), _CHECKED_ROWS):
        infinite = np.flatnonzero(~np.isfinite(features[rows]).all(axis=1))
        if len(infinite):
            raise UserError(f"features of {source}: row {rows.start + infinite[0]} is not finite")
    count = len(features)
    ids, labels, splits, coarse_labels = (
        _as_names(arrays.get(name), name, count, source) for name in FeatureTable._fields[1:]
    )
    ids = np.arange(count).astype(str) if ids is None else ids
    labels = np.full(count, "") if labels is None else labels
    for column in features[:, 0], features[:, -1]:  # Where tables have their labels.
        if (column % 1 == 0).all() and labels.tolist() == [f"{x:.0f}" for x in column]:
            console.warn(f"a column of features of {source} equals the labels; leave it out")
    return FeatureTable(features, ids, labels, splits, coarse_labels)


def _as_names(
    column: Column | None, name: str, count: int, source: str
) -> Shaped[np.ndarray, " n"] | None:
    """Converts a column of labels, ids or splits to strings; None if there is no column."""
    if column is None:
        return None
    values: np.ma.MaskedArray = np.ma.asarray(column)  # `tolist` then has None for masked values.
    if values.shape != (count,):
        shape = f"the shape {list(values.shape)} instead of [{count}]"
        raise UserError(f"{name} of {source} have {shape}: one is needed for each row")
    if values.dtype.kind not in "iufbUSO":
        raise UserError(f"{name} of {source} must be whole numbers or strings, not {values.dtype}")
    if name == "splits":
        return np.array(split_names(values.tolist()), dtype=str)
    names = []
    for row, value in enumerate(values.tolist()):
        is_path = name == "ids" and isinstance(value, str)  # Paths stay as they are.
        names.append(value if is_path else class_name(value, f"{name} of {source}, row {row}"))
    missing = collections.Counter(text for text in names if text.lower() in MISSING)
    if name == "labels" and missing:  # `astype(str)` turns missing values into such text.
        shown = ", ".join(f"{text!r} ({counted(count, 'row')})" for text, count in missing.items())
        console.warn(f"{source} has classes named {shown}; leave out rows without a class")
    return np.array(names if name == "ids" else one_spelling(names), dtype=str)


def read_arrays(where: str | os.PathLike[str], **label_files: Any) -> dict[str, np.ndarray]:
    """Reads the arrays of a file of features, and arrays such as `labels` from other files.

    `where` may end in options, see `hypjax.system.columns`. Executes nothing in a file. Raises
    UserError if a file is damaged or of another kind.
    """
    location, options = split_options(os.fspath(where))
    require_options(options, _OPTIONS, location)
    arrays = _read(location, _READERS, options)
    for name, file in label_files.items():
        if file is not None:
            arrays[name] = _read(os.fspath(file), _LABEL_READERS)
    return arrays


def _read(location: str, readers: Mapping[str, Callable[..., Any]], *options: Options) -> Any:
    path = pathlib.Path(location).expanduser()
    if path.is_dir():
        raise UserError(
            f"{path} is a folder; hypjax.embed --images={path} makes a file of embeddings"
        )
    if (read := readers.get(path.suffix.lower())) is None:
        raise UserError(f"cannot read {path}: its name must end in {', '.join(readers)}")
    with explained(f"cannot read {path}"):
        return read(path, *options)


def _columns_of_arrays(names: Collection[str], options: Options, path: object) -> dict[str, str]:
    """Finds the columns of a file, by the name of the array that each fills."""
    columns = [find_column(names, role, options, path) for role in _ROLES]
    return {x: y for x, y in zip(FeatureTable._fields, columns, strict=True) if y is not None}


def _named(arrays: Mapping[str, Any], options: Options, path: object) -> dict[str, Any]:
    """Adds the arrays of `FeatureTable` that have other names; arrays of pixels are none."""
    names = [name for name, x in arrays.items() if np.ndim(x) < 3 or name in FeatureTable._fields]
    columns = _columns_of_arrays(names, options, path)
    return {**arrays, **{name: np.asarray(arrays[column]) for name, column in columns.items()}}


def _read_h5(path: pathlib.Path, options: Options) -> dict[str, Any]:
    require_package("h5py", f"reading a {path.suffix} file", "hypjax[hdf5]")
    import h5py

    with path.open("rb") as opened, h5py.File(opened) as file:
        items: dict[str, Any] = {}  # Groups and links, too.
        file.visititems_links(items.__setitem__)
        file.visititems(items.__setitem__)
        arrays = {name: x for name, x in items.items() if isinstance(x, h5py.Dataset)}
        for name, x in items.items():  # HDF5 would open any file that they name.
            if isinstance(x, h5py.ExternalLink) or name in arrays and (x.external or x.is_virtual):
                raise ValueError(f"{name} points elsewhere; copy its values into this file")
        read = {x: y for x, y in _named(arrays, options, path).items() if y is not arrays.get(x)}
        return read if "features" in read else dict.fromkeys(arrays)


def _read_tensors(path: pathlib.Path, options: Options) -> dict[str, np.ndarray]:
    content = files.read_torch(path)
    if isinstance(content, tuple) and len(content) in (2, 3):
        return _paper_arrays(*content)
    if isinstance(content, list | tuple):
        raise ValueError('it holds a list; save {"features": features, "labels": labels}')
    arrays = content if isinstance(content, dict) else {"features": content}
    return _named({name: files.to_numpy(x) for name, x in arrays.items()}, options, path)


def _paper_arrays(x: Any, y: Any, index: Any = None) -> dict[str, np.ndarray]:
    """Arrays of (x, y), or of (x, y, index), whose index numbers the images of the dataset."""
    arrays = {"features": files.to_numpy(x), "labels": files.to_numpy(y), IN_SPACE: np.array(True)}
    if index is not None:  # Several processes repeat images to fill their last batches.
        arrays["ids"], rows = np.unique(files.to_numpy(index), return_index=True)
        arrays |= {name: arrays[name][rows] for name in ("features", "labels")}
    return arrays


def _read_csv(path: pathlib.Path, options: Options) -> dict[str, np.ndarray]:
    import pyarrow.csv

    delimiter, header = files.csv_header(path)
    names = files.column_names(header)
    columns = _columns_of_arrays(names, options, path)
    types = dict.fromkeys(columns.values(), pyarrow.string())
    types |= dict.fromkeys(_numbered_columns(names, columns), pyarrow.float32())
    arguments = (
        pyarrow.csv.ReadOptions(column_names=names, skip_rows=1),
        pyarrow.csv.ParseOptions(delimiter=delimiter),
        pyarrow.csv.ConvertOptions(column_types=types),
    )
    return _table_arrays(pyarrow.csv.read_csv(path, *arguments), options, path)


def _table_arrays(table: Any, options: Options, path: pathlib.Path) -> dict[str, np.ndarray]:
    """Arrays of a table's columns; raises `ValueError` without columns of features."""
    columns = _columns_of_arrays(names := table.column_names, options, path)
    if name := columns.pop("features", None):
        import pyarrow.compute

        rows = table.column(name).combine_chunks()
        if not hasattr(rows.type, "value_type"):
            raise ValueError(f"the column {name} holds no lists; use columns f0, f1, ...")
        lengths = pyarrow.compute.list_value_length(rows).to_numpy(zero_copy_only=False)
        if len(set(lengths.tolist())) != 1:  # The length of a missing list is NaN.
            raise ValueError(f"the lists in the column {name} differ in length")
        features = rows.flatten().to_numpy(zero_copy_only=False).reshape(len(rows), -1)
    elif numbered := _numbered_columns(names, columns):
        features = np.stack([table.column(name).to_numpy() for name in numbered], axis=1)
    else:
        unknown = [name for name in names if name not in columns.values()]
        problem = "no column features, and others are not all numbered without gaps, as f0 and f1"
        raise ValueError(f"it has {problem}: {', '.join(unknown[-9:])}")
    lists = {array: table.column(name).to_pylist() for array, name in columns.items()}
    return {"features": features, **{x: np.array(y, dtype=object) for x, y in lists.items()}}


_READERS = {
    ".npz": lambda path, options: _named(files.read_npz(path), options, path),
    ".npy": lambda path, options: _named(
        {"features": files.read_npy(path, "features", mapped=True)}, options, path
    ),
    ".parquet": lambda path, options: _table_arrays(files.read_parquet(path), options, path),
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".pt": _read_tensors,
    ".h5": _read_h5,
    ".hdf5": _read_h5,
}
_LABEL_READERS = {
    ".npy": lambda path: files.read_npy(path, "labels"),
    ".txt": lambda path: np.char.strip(path.read_text("utf-8-sig").splitlines()),
    ".pt": lambda path: files.to_numpy(files.read_torch(path)),
}
