"""Files beside the graph of a gallery: a table of its images, and their points."""

import json
import pathlib
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float32, Int

from hypjax.errors import UserError
from hypjax.geometry import Space
from hypjax.retrieval.embeddings import describe_space, replacing_file, space_of


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


def write(path: pathlib.Path, table: Table, facts: Facts) -> None:
    """Writes the files beside a graph.

    Args:
        path: The graph's file, which exists.
        table: One row per image.
        facts: What the gallery is.

    Raises:
        UserError: A file cannot be written.
    """
    import pyarrow
    import pyarrow.parquet

    with replacing_file(_beside(path, "npy")) as temporary, temporary.open("wb") as file:
        np.save(file, table.points)
    described = facts._asdict() | {"space": describe_space(facts.space)}
    metadata = {"hypjax": json.dumps(described | {"bytes": path.stat().st_size})}
    columns = {
        "key": table.keys,
        "id": table.ids.tolist(),
        "label": table.labels.tolist(),
        "scanned": table.scanned,
    }
    rows = pyarrow.table(columns).replace_schema_metadata(metadata)
    with replacing_file(_beside(path, "parquet")) as temporary:
        pyarrow.parquet.write_table(rows, temporary)


def read(path: pathlib.Path) -> tuple[Table, Facts]:
    """Reads the files beside a graph; the points are memory-mapped.

    Args:
        path: The graph's file.

    Raises:
        UserError: A file is missing or damaged, or does not belong to the graph.
    """
    if not path.exists():
        raise UserError(f"there is no gallery at {path}")
    rows, described = _read_rows(path)
    if path.stat().st_size != described.pop("bytes"):
        raise UserError(f"{path} is not the graph that its table describes; export it again")
    points = _read_points(path, len(rows["keys"]))
    return Table(**rows, points=points), Facts(**described)


def _read_rows(path: pathlib.Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    import pyarrow.parquet

    beside = _beside(path, "parquet")
    try:
        table = pyarrow.parquet.read_table(beside)
        facts = json.loads(table.schema.metadata[b"hypjax"])
        facts = {name: facts[name] for name in (*Facts._fields, "bytes")}
        facts["space"] = space_of(facts["space"])
        strings = {f"{name}s": np.array(table[name].to_pylist(), str) for name in ("id", "label")}
        scanned = np.array(table["scanned"].to_pylist(), bool)
        return {"keys": table["key"].to_numpy(), "scanned": scanned} | strings, facts
    except FileNotFoundError as error:
        raise UserError(f"{path} needs its table, {beside}; export it again") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"the table beside {path} is damaged; export the gallery again") from error


def _read_points(path: pathlib.Path, count: int) -> Float32[np.ndarray, "n d"]:
    beside = _beside(path, "npy")
    try:
        points = np.load(beside, mmap_mode="r")
        if points.dtype != np.float32 or points.ndim != 2 or len(points) != count:
            raise ValueError(f"they are {points.dtype} {points.shape}")
        return points
    except FileNotFoundError as error:
        raise UserError(f"{path} needs its points, {beside}; export it again") from error
    except Exception as error:  # NumPy raises almost anything for damaged headers.
        raise UserError(
            f"the points beside {path} are damaged; export the gallery again"
        ) from error


def _beside(path: pathlib.Path, suffix: str) -> pathlib.Path:
    return path.with_name(f"{path.name}.{suffix}")
