"""Files of a gallery in a graph: the graph itself, the points, and a table of the images.

The table holds checksums of all three, so that neither damaged files nor those of different
galleries are searched.
"""

import json
import pathlib
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float32, Int

from hypjax.errors import UserError
from hypjax.geometry import Space
from hypjax.retrieval.embeddings import describe_space, space_of
from hypjax.system.files import checksums, replacing_together

_TYPES = {"space": dict, "fingerprint": str, "rounded": bool, "candidates": int, "recall": float}
_TYPES |= {"checksums": dict}


class Table(NamedTuple):
    """What a gallery holds beside its graph, one row per image.

    Attributes:
        keys: Keys of the images in the graph, ascending.
        ids: Paths, [n] strings.
        labels: Names of the classes, [n] strings; empty if unknown.
        scanned: Whether the image is near the centre, and is compared with every query.
        points: Points of the space, which may be memory-mapped.
    """

    keys: Int[np.ndarray, " n"]
    ids: np.ndarray
    labels: np.ndarray
    scanned: Bool[np.ndarray, " n"]
    points: Float32[np.ndarray, "n d"]


class Facts(NamedTuple):
    """What a gallery is, and how it is searched.

    Attributes:
        space: Space of the points.
        fingerprint: Fingerprint of the model.
        rounded: Whether the vectors of the graph are rounded to bfloat16.
        candidates: Number of candidates of a search for 10 neighbours.
        recall: Share of them that searches find.
    """

    space: Space
    fingerprint: str
    rounded: bool
    candidates: int
    recall: float


def write(
    path: pathlib.Path, save_graph: Callable[[str], None], table: Table, facts: Facts
) -> None:
    """Writes the files, which replace earlier ones at the end, all at once.

    Args:
        path: The graph's file.
        save_graph: Writes the graph to a path.
        table: One row per image.
        facts: What the gallery is.

    Raises:
        UserError: A file cannot be written.
    """
    import pyarrow
    import pyarrow.parquet

    try:
        with replacing_together(path) as folder:
            graph, points, rows = files(folder / path.name)
            save_graph(str(graph))
            np.save(points, table.points)
            described = facts._asdict() | {
                "space": describe_space(facts.space),
                "checksums": {"graph": checksums(graph), "points": checksums(points)},
            }
            text = json.dumps(described)
            columns = [table.keys, table.ids.tolist(), table.labels.tolist(), table.scanned]
            metadata = {"hypjax": text, "hypjax.checksum": _checksum(text, *columns)}
            written = pyarrow.table(columns, schema=_schema()).replace_schema_metadata(metadata)
            pyarrow.parquet.write_table(written, rows)
    except (OSError, RuntimeError) as error:  # usearch raises the latter.
        raise UserError(
            f"cannot write to {path} ({getattr(error, 'strerror', None) or error})"
        ) from error


def files(path: pathlib.Path) -> list[pathlib.Path]:
    """All files of a gallery, given that of its graph."""
    return [path, _beside(path, "npy"), _beside(path, "parquet")]


def read(path: pathlib.Path) -> tuple[Table, Facts]:
    """Reads the files beside a graph and compares all with their checksums.

    Args:
        path: The graph's file.

    Returns:
        The table, whose points are memory-mapped, and what the gallery is.

    Raises:
        UserError: A file is missing or damaged, or belongs to another gallery.
    """
    if not path.exists():
        raise UserError(f"there is no gallery at {path}")
    columns, facts, recorded = _read_rows(path)
    points = _beside(path, "npy")
    if not points.exists():
        raise UserError(f"{path} needs its points, {points}; export it again")
    for file, expected in zip((path, points), recorded, strict=True):
        try:
            found = checksums(file)
        except OSError as error:
            raise UserError(f"cannot read {file} ({error.strerror})") from error
        if found != expected:
            raise UserError(
                f"{file} is damaged, or not the one that the table beside it describes; export the "
                "gallery again"
            )
    return Table(*columns, np.load(points, mmap_mode="r")), facts


def _read_rows(path: pathlib.Path) -> tuple[list[np.ndarray], Facts, list[list[int]]]:
    """Columns of the table, what the gallery is, and the checksums of the graph and the points."""
    import pyarrow.parquet

    beside = _beside(path, "parquet")
    try:
        rows = pyarrow.parquet.read_table(beside)
        text, checksum = (rows.schema.metadata[name] for name in (b"hypjax", b"hypjax.checksum"))
        if not rows.schema.equals(_schema()) or any(column.null_count for column in rows.columns):
            raise ValueError("its columns are others")
        keys, scanned = (rows[name].to_numpy() for name in ("key", "scanned"))
        ids, labels = (rows[name].to_pylist() for name in ("id", "label"))
        if _checksum(text.decode(), keys, ids, labels, scanned) != checksum.decode():
            raise ValueError("its checksum is another one")
        described = json.loads(text)
        types = {name: type(described[name]) for name in _TYPES}
        if types != _TYPES:
            raise TypeError(f"its fields are {types}")
        described["space"] = space_of(described["space"])
        facts = Facts(*(described[name] for name in Facts._fields))
        recorded = [described["checksums"][name] for name in ("graph", "points")]
        return [keys, np.array(ids, str), np.array(labels, str), scanned], facts, recorded
    except FileNotFoundError as error:
        raise UserError(f"{path} needs its table, {beside}; export it again") from error
    except Exception as error:  # pyarrow raises almost anything on damaged files.
        raise UserError(
            f"the table beside {path} is damaged, or of an earlier version of hypjax; export the "
            "gallery again"
        ) from error


def _schema() -> Any:
    """Columns of the table."""
    import pyarrow

    types = {"key": "int64", "id": "string", "label": "string", "scanned": "bool"}
    return pyarrow.schema([(name, pyarrow.type_for_alias(kind)) for name, kind in types.items()])


def _checksum(
    described: str,
    keys: Int[np.ndarray, " n"],
    ids: list[str],
    labels: list[str],
    scanned: Bool[np.ndarray, " n"],
) -> str:
    """CRC-32 of a table."""
    parts = [described.encode(), keys.tobytes(), scanned.tobytes()]
    parts += ["\0".join(strings).encode() for strings in (ids, labels)]
    return str(zlib.crc32(b"\0".join(parts)))


def _beside(path: pathlib.Path, suffix: str) -> pathlib.Path:
    return path.with_name(f"{path.name}.{suffix}")
