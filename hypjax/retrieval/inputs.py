"""Checks and preparation of points and labels, shared by all searches."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int, Shaped

from hypjax.errors import UserError
from hypjax.geometry import Space
from hypjax.types import composed

MULTIPLE = 64  # Factors of a matrix product are padded to a multiple of this many rows.
# Separations are computed for a multiple of this many items. A remainder would leave the vectorised
# loop, where roundings may differ; but duplicates must be equally far.
LANES = 16
_BLOCK_BYTES = 2**21  # Largest size of the rows that `by_blocks` passes to a function at once.
PART_BYTES = 32 * 2**20  # Largest size of the points that are held at once.
_CHECKED_BYTES = 4 * 2**20  # Size of the points that are checked at once.
Points = Float[np.ndarray, "n d"]  # May be memory-mapped, of any floating-point type.
GalleryPoints = Float[np.ndarray, "m d"]
Rows = Int[np.ndarray, " r"]  # Row numbers of points.
SomeRows = Int[np.ndarray, " r2"]  # Some of these rows.
OwnIds = Int[np.ndarray, " n"] | None  # Gallery index of each query's own image, −1 for none.
# Gallery rows of each query's own image; () for no rows at all.
OwnRows = Sequence[Sequence[int]] | Int[np.ndarray, "n k"]
Ids = Int[np.ndarray, "n l"]  # Gallery indices.
# Distances or separations, ascending, and ids.
Nearest = tuple[Float[np.ndarray, "n k"], Int[np.ndarray, "n k"]]


class Labelled(NamedTuple):
    """Points with class numbers."""

    points: Points
    labels: Int[np.ndarray, " n"]
    ids: OwnIds = None  # Only queries have own images.

    def take(self, rows: "Rows | slice") -> "Labelled":
        """Selects points."""
        ids = None if self.ids is None else self.ids[rows]
        return Labelled(self.points[rows], self.labels[rows], ids)


def host_rows(x: Points, rows: slice | Rows) -> Float[np.ndarray, "r d"]:
    """Reads rows of points into memory, in float32."""
    return np.asarray(x[rows], np.float32)


def blocks(num_rows: int, size: int) -> list[slice]:
    """Slices of `size` rows, at least 1, that cover all rows; the last may reach beyond."""
    size = max(size, 1)
    return [slice(start, start + size) for start in range(0, num_rows, size)]


def spaced(num_rows: int, most: int) -> Rows:
    """Up to `most` row numbers, evenly spaced from the first to the last."""
    return np.unique(np.linspace(0, num_rows - 1, min(num_rows, most), dtype=int))


def split(rows: Rows, size: int) -> list[Int[np.ndarray, " _"]]:
    """Splits an array of rows into blocks of `size` rows, at least 1; the last may be smaller."""
    return [rows[block] for block in blocks(len(rows), size)]


def pad_rows(x: np.ndarray, rows: int) -> np.ndarray:
    """Pads an array with rows of zeros to a number of rows; copies none that has this number."""
    padding = [(0, rows - len(x))] + [(0, 0)] * (x.ndim - 1)
    return np.pad(x, padding) if len(x) < rows else x


def by_blocks(
    function: Callable[[np.ndarray], Array], points: Points, out: Points | None = None
) -> np.ndarray:
    """Applies a jitted function to padded blocks of points, so that few programs are compiled.

    The results fill `out` if its shape and dtype fit. This may be `points`, which then take no
    second array: a block is read before its result is written.
    """
    rows_at_once = max(_BLOCK_BYTES // (points.itemsize * points.shape[1]), 1)
    size = 1 << (min(rows_at_once, len(points)) - 1).bit_length()
    for rows in blocks(max(len(points), 1), size):
        block = points[rows]
        output = np.asarray(function(pad_rows(block, size)))[: len(block)]
        shape = (len(points), *output.shape[1:])
        if out is None or (out.shape, out.dtype) != (shape, output.dtype):
            out = np.empty(shape, output.dtype)
        out[rows] = output
    assert out is not None  # There is at least one block.
    return out


def round_up(number: int, multiple: int) -> int:
    """Rounds a number up to a multiple."""
    return -(-number // multiple) * multiple


def check_space(space: object) -> None:
    """Raises a `UserError` unless the argument is a space, and not its name or class."""
    if isinstance(space, type) or not isinstance(space, Space):
        raise UserError(f"space is {space!r}; it must be a space, such as hypjax.geometry.Sphere()")


def check_in_space(space: Space, points: Points) -> None:
    """Raises a `UserError` unless all points belong to the space."""
    for rows in blocks(len(points), _CHECKED_BYTES // (4 * points.shape[1])):
        space.check(host_rows(points, rows), first=rows.start)


def unmasked(name: str, array: ArrayLike | Sequence[Any]) -> np.ndarray:
    """Converts to a NumPy array; raises a `UserError` for masked values, which it would unmask."""
    if any(map(np.ma.is_masked, array if isinstance(array, list | tuple) else [array])):
        raise UserError(f"{name} have masked values; leave these rows out, or fill them")
    return np.asarray(array)


def check_points(
    queries: Float[ArrayLike, "n d"], gallery: Float[ArrayLike, "m d"]
) -> tuple[Points, GalleryPoints]:
    """Checks shapes and types of points, and returns NumPy arrays."""
    queries, gallery = unmasked("queries", queries), unmasked("gallery", gallery)
    for name, points in (("queries", queries), ("gallery", gallery)):
        if not jnp.issubdtype(points.dtype, jnp.floating) or points.ndim != 2 or 0 in points.shape:
            kind = f"{points.dtype} of shape {points.shape}"
            raise UserError(f"{name} must be floats, [number, dimension] and not empty, not {kind}")
    if (dim := queries.shape[1]) != gallery.shape[1]:
        raise UserError(f"queries have {dim} coordinates, the gallery {gallery.shape[1]}")
    return queries, gallery


def check_count(k: object, num_items: int | None = None, name: str = "k") -> None:
    """Raises a `UserError` unless k is a whole number from 1 to `num_items`, None for no limit."""
    if isinstance(k, bool) or not isinstance(k, int | np.integer) or k < 1:
        raise UserError(f"{name} is {k!r}; it must be a positive whole number")
    if num_items is not None and k > num_items:
        raise UserError(f"{name} is {k}, but a search finds only {num_items} images")


def check_search(k: object, own_ids: OwnIds, num_queries: int, num_items: int) -> None:
    """Raises a `UserError` unless `own_ids` are valid and each query can find k items."""
    if own_ids is not None:
        if np.shape(own_ids) != (num_queries,) or not are_indices(own_ids, num_items, least=-1):
            raise UserError(f"own_ids must be {num_queries} indices from -1 to {num_items - 1}")
        num_items -= 1
    check_count(k, num_items)


def are_indices(ids: ArrayLike | Sequence[int], num_items: int, least: int = 0) -> bool:
    """Whether all ids are integers from `least` to `num_items` − 1."""
    indices = unmasked("indices", ids)
    are_integers = indices.dtype.kind in "iu" or not indices.size  # An empty list is of floats.
    return bool(are_integers and ((indices >= least) & (indices < num_items)).all())


def labelled(
    queries: Float[ArrayLike, "n d"],
    query_labels: Shaped[ArrayLike, " n"] | Sequence[Any],
    gallery: Float[ArrayLike, "m d"] | None,
    gallery_labels: Shaped[ArrayLike, " m"] | Sequence[Any] | None,
) -> tuple[Labelled, Labelled]:
    """Checks points and labels, and numbers the classes from 0; returns queries and gallery.

    Without a gallery, both are the same object: the queries, whose `ids` are their rows.
    """
    if gallery is None and gallery_labels is not None:
        raise UserError("labels of a gallery need the gallery's points")
    points, items = check_points(queries, queries if gallery is None else gallery)
    labels = [_checked_labels("queries", points, query_labels)]
    if gallery is not None:
        labels.append(_checked_labels("gallery", items, gallery_labels))
    if len({array.dtype.kind for array in labels}) > 1:  # NumPy would compare numbers as text.
        raise UserError("labels of the queries and the gallery must both be numbers or strings")
    classes = np.unique(np.concatenate(labels), return_inverse=True)[1].astype(np.int32)
    if gallery is None:
        query_set = Labelled(points, classes, np.arange(len(points)))
        return query_set, query_set
    return Labelled(points, classes[: len(points)]), Labelled(items, classes[len(points) :])


def _checked_labels(
    name: str, points: Points, given: Shaped[ArrayLike, " n"] | Sequence[Any] | None
) -> Shaped[np.ndarray, " n"]:
    labels = np.asarray(None) if given is None else unmasked(f"labels of the {name}", given)
    if labels.dtype.kind == "O" and all(isinstance(label, str) for label in labels.flat):
        labels = labels.astype(str)
    if labels.shape != (len(points),) or labels.dtype.kind not in "iuU":
        kind = f"{labels.dtype} of shape {labels.shape}"
        raise UserError(f"{name} need {len(points)} whole numbers or strings as labels, not {kind}")
    is_text = labels.dtype.kind == "U"
    return np.array([*map(composed, labels.tolist())]) if is_text else labels.astype(np.int64)
