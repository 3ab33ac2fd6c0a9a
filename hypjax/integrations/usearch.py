"""Approximate search in a space's own distance: galleries in an HNSW graph of usearch.

Graphs and lists for inner products assume vectors of similar length, which those of hyperbolic
points are not. So this graph compares points by ‖x − y‖² / ((1 − c‖x‖²)(1 − c‖y‖²)), their
separation, of which the distance 2/√c·asinh(√(c·separation)) is an increasing function. A vector of
the graph holds the coordinates of a point and, last, 1 / (1 − c‖x‖²); on the sphere, it holds the
coordinates alone. Points of a space that is isometric to a ball are compared in that ball.

The time of a search is that of reading vectors from memory. So they are rounded to bfloat16, the
upper half of a float32, where that is fine enough to find candidates. In a ball, the points near
its centre may be scanned, too: they are near to all points. The candidates are ranked by the exact
distances of the points themselves.
"""

import functools
import json
import os
import pathlib
import sys
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Float64, Int

from hypjax.errors import UserError
from hypjax.geometry import Space, Sphere, arithmetic
from hypjax.retrieval import inputs
from hypjax.retrieval.embeddings import Embeddings, describe_space, space_of
from hypjax.retrieval.euclidean import (
    NEAREST,
    WANTED,
    assured,
    found_neighbours,
    held_out,
    in_ball,
    rank,
    separation_factors,
    warn_of_misses,
)
from hypjax.retrieval.galleries import ArrayGallery
from hypjax.retrieval.neighbors import search
from hypjax.system.files import checksums, read_together, replacing_together

SUFFIX = ".usearch"
_SAMPLE = 1000  # Points, at most, whose neighbours are searched for to choose a setting.
# Settings of searches, of which the cheapest is taken: candidates, and scanned shares of a ball.
_CANDIDATES = (12, 16, 20, 24, 32, 40, 48, 56, 64, 72, 80, 88, 96, 112, 128, 160, 192, 224, 256)
_CANDIDATES += (320, 384, 448, 512, 768, 1024, 1536, 2048)
_SCANNED = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2)
# Cost of a scan, in distances that are computed in the graph: that of a point, and of the ranking.
_SCAN_COST, _RANK_COST = 0.07, 300
_SPARE = 4  # Candidates beyond k that are ranked, at least, if vectors are rounded.

_SPARSE, _DENSE = (32, 256), (64, 512)  # Links of a point, and candidates when it is added.
_SHORT = 32  # Vectors of fewer coordinates fill few cache lines, so that rounding gains nothing.
_ROUNDING = 2**-9  # Typical relative error of a point in bfloat16.
_TOLERATED = 0.05  # Error of points, as a share of the distances between neighbours.
_MOST = 0.01  # Share of the points whose error may be larger.
_SLICE = 256  # Queries whose products with the centre are computed at once.
_SLACK = 1e-5  # Relative error of those products, in float32, that is allowed for.
# Types of the facts in the table's metadata.
_TYPES = {"space": dict, "fingerprint": str, "rounded": bool, "candidates": int, "recall": float}
_TYPES |= {"checksums": dict}

_Points = Float32[np.ndarray, "n d"]  # Of a space with a ball, or the sphere.
_Ranked = tuple[Float64[np.ndarray, "n k"], Int[np.ndarray, "n k"]]  # Separations and items.


class _Setting(NamedTuple):
    """A setting of searches."""

    cost: float  # In distances that are computed.
    candidates: int
    scanned: int
    recall: float


class _Table(NamedTuple):
    """What a gallery holds beside its graph, one row per image."""

    keys: Int[np.ndarray, " n"]  # Of the images in the graph, ascending.
    ids: np.ndarray  # Paths, strings.
    labels: np.ndarray  # Names of the classes, strings; empty if unknown.
    scanned: Bool[np.ndarray, " n"]  # Whether it is near the centre, and compared with all queries.
    points: _Points  # They may be memory-mapped.


class _Centre:
    """The points nearest to the centre of a ball, for a scan of all of them.

    They are near to every point, and in many dimensions they are almost equally near, so that a
    graph needs many candidates to find the nearest of them. A matrix product compares them all.
    """

    def __init__(
        self, gallery: Float32[np.ndarray, "m d"], items: Int[np.ndarray, " s"], space: Space
    ) -> None:
        points = in_ball(gallery[items], space).astype(np.float64)
        scales = separation_factors(points, space)[:, None]
        squares = np.sum(points**2, axis=1, keepdims=True)
        vectors = scales * np.concatenate([points, np.ones_like(squares), squares], axis=1)
        # A product of NumPy would keep a core busy for a while after its end.
        self._vectors = jax.device_put(
            vectors.astype(np.float32), jax.local_devices(backend="cpu")[0]
        )
        self._items = items
        self._largest = (squares.max(initial=0), scales.max(initial=1))
        self._space = space

    def within(
        self, queries: _Points, separations: Float64[np.ndarray, " n"]
    ) -> tuple[Int[np.ndarray, " p"], Int[np.ndarray, " p"]]:
        """Finds the points within a separation of each query, and perhaps some slightly farther.

        Returns rows of the queries and indices of the items.
        """
        queries = in_ball(queries, self._space)
        squares = np.sum(np.square(queries, dtype=np.float64), axis=1, keepdims=True)
        vectors = np.concatenate([-2 * queries, squares, np.ones_like(squares)], axis=1)
        square, scale = self._largest
        slack = _SLACK * scale * (squares[:, 0] + square)
        limits = separations / separation_factors(queries, self._space) + slack
        vectors, limits = vectors.astype(np.float32), limits.astype(np.float32)
        rows, items = [np.empty(0, int)], [np.empty(0, int)]
        size = min(_SLICE, 1 << (len(queries) - 1).bit_length())  # Few sizes to compile for.
        for block in inputs.blocks(len(queries), size):
            padded = [inputs.pad_rows(x[block], size) for x in (vectors, limits)]
            near = np.asarray(_near(*padded, self._vectors))[: len(queries) - block.start]
            row, place = np.divmod(np.flatnonzero(near), max(len(self._items), 1))
            rows.append(row + block.start)
            items.append(self._items[place])
        return np.concatenate(rows), np.concatenate(items)


@jax.jit
def _near(
    queries: Float32[Array, "q e"], limits: Float32[Array, " q"], vectors: Float32[Array, "s e"]
) -> Bool[Array, "q s"]:
    return arithmetic.inner_products(queries, vectors) <= limits[:, None]


class GraphGallery(ArrayGallery):
    """A gallery in a graph, with the paths and classes of its images.

    Three files hold it: the graph, such as gallery.usearch, and beside it gallery.usearch.parquet,
    a table with the `key`, `id` and `label` of each image, and gallery.usearch.npy, their points.

    Attributes:
        space: Space of the points: isometric to a ball, or the sphere.
        fingerprint: Fingerprint of the model.
        candidates: Number of candidates of a search for 10 neighbours: more find more of them, and
            take longer. Searches for more neighbours take proportionally more candidates.
        recall: Share of the 10 nearest neighbours that searches for new queries find, at least, by
            a sample that was held out when it was built.
        ids: Paths of the images, [n] strings.
        labels: Names of their classes, [n] strings; empty if unknown.
    """

    def __init__(
        self,
        index: Any,
        table: _Table,
        *,
        space: Space,
        fingerprint: str,
        rounded: bool,
        candidates: int = _CANDIDATES[0],
        recall: float = 1.0,
        writable: bool = True,
    ) -> None:
        self._index = index
        self._replace(table)
        self._rounded, self._writable = rounded, writable
        self.space, self.fingerprint = space, fingerprint
        self.candidates, self.recall = candidates, recall

    @property
    def vectors(self) -> _Points:
        """Points of the images, [n, d]; they may be memory-mapped."""
        return self._table.points

    @classmethod
    def build(cls, embeddings: Embeddings) -> Self:
        """Builds a graph, and measures how many of the nearest neighbours searches find.

        The candidates of a search, and how many points near the centre are compared with every
        query, are chosen so that 98% of the 10 nearest of a sample, which is inserted afterwards,
        are found at the least cost. If no setting finds as many, a warning says how many are found.
        Raises a `UserError` if usearch or numba is not installed, or for a space that is neither
        isometric to a ball nor the sphere.
        """
        points, space = embeddings.vectors, embeddings.space
        _create(space, points.shape[1], rounded=False)  # Checks the space, before the search.
        sample, others, exact = _sample(points, space)
        farthest = points[exact[1][:, -1]]
        rounded = _can_round(in_ball(points[sample], space), in_ball(farthest, space))
        index = _create(space, points.shape[1], rounded=rounded)
        keys, scanned = np.arange(len(points)), np.zeros(len(points), bool)
        table = _Table(keys, embeddings.ids, embeddings.labels, scanned, points)
        fingerprint = embeddings.fingerprint
        gallery = cls(index, table, space=space, fingerprint=fingerprint, rounded=rounded)
        gallery._insert(others, points[others])
        gallery._tune(sample, exact)
        gallery._insert(sample, points[sample])
        warn_of_misses(gallery.recall)
        return gallery

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, writable: bool = False) -> Self:
        """Opens a gallery by the path of its graph.

        If it is `writable`, the graph is read into memory, so that it can change. Otherwise its
        file is memory-mapped.
        Raises a `UserError` if a file is missing or damaged, or usearch or numba is not installed.
        """
        path = pathlib.Path(path)

        def read() -> Self:
            table, facts = _read_files(path)
            index = _create(facts["space"], table.points.shape[1], rounded=facts["rounded"])
            _read_graph(index, path, writable=writable)
            return cls(index, table, **facts, writable=writable)

        return read_together(path, _files(path), read)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the files, which replace earlier ones at the end, all at once.

        The table holds checksums of all three, so that neither damaged files nor those of different
        galleries are searched.
        Raises a `UserError` if one cannot be written.
        """
        import pyarrow
        import pyarrow.parquet

        path, table = pathlib.Path(path), self._table
        try:
            with replacing_together(path) as folder:
                graph, points, rows = _files(folder / path.name)
                self._index.save(str(graph))
                np.save(points, table.points)
                described = {
                    "space": describe_space(self.space),
                    "fingerprint": self.fingerprint,
                    "rounded": self._rounded,
                    "candidates": self.candidates,
                    "recall": self.recall,
                    "checksums": {"graph": checksums(graph), "points": checksums(points)},
                }
                text = json.dumps(described)
                columns = [table.keys, table.ids.tolist(), table.labels.tolist(), table.scanned]
                metadata = {"hypjax": text, "hypjax.checksum": _checksum(text, *columns)}
                written = pyarrow.table(columns, schema=_schema())
                pyarrow.parquet.write_table(written.replace_schema_metadata(metadata), rows)
        except (OSError, RuntimeError) as error:  # usearch raises the latter.
            raise UserError(
                f"cannot write to {path} ({getattr(error, 'strerror', None) or error})"
            ) from error

    def add(self, embeddings: Embeddings) -> None:
        """Adds images.

        Raises a `UserError` if another model embedded them, one is not a point of the space or is
        in the gallery already, or the gallery was not opened as writable.
        """
        self._require_writable()
        embeddings.check()
        if embeddings.fingerprint != self.fingerprint:
            raise UserError("the images were embedded by another model; embed them with this one")
        known = np.isin(embeddings.ids, self.ids)
        if known.any():
            raise UserError(f"{embeddings.ids[known][0]} is in the gallery; remove it first")
        table, points = self._table, embeddings.vectors
        first = table.keys[-1] + 1 if len(self) else 0
        keys = np.arange(first, first + len(embeddings))
        self._insert(keys, points)
        farthest = np.linalg.norm(table.points[table.scanned], axis=1).max(initial=-1)
        scanned = np.linalg.norm(points, axis=1) <= farthest
        added = _Table(keys, embeddings.ids, embeddings.labels, scanned, points)
        self._replace(_Table(*map(np.concatenate, zip(table, added, strict=True))))

    def remove(self, ids: Sequence[str]) -> None:
        """Removes images; a `UserError` if one is not there, or the gallery is not writable."""
        self._require_writable()
        missing = np.setdiff1d(ids, self.ids)
        if len(missing):
            raise UserError(f"{missing[0]} is not in the gallery")
        removed = np.isin(self.ids, ids)
        self._index.remove(self._table.keys[removed])
        self._replace(_Table(*(column[~removed] for column in self._table)))

    def search_rows(
        self, points: Float32[np.ndarray, "n d"], k: int
    ) -> tuple[Float32[np.ndarray, "n k"], Int[np.ndarray, "n k"]]:
        """Distances and rows of the k nearest images; −1 where the graph reaches fewer.

        Raises a `UserError` if a query is not a point of the space.
        """
        self.space.check(points)
        separations, rows = self._nearest(points, k)
        with jax.enable_x64(True):
            distances = np.asarray(self.space.distance_at(separations))
        return distances.astype(np.float32), rows

    def _nearest(self, points: _Points, k: int) -> _Ranked:
        """Separations and rows: infinite, and −1, where the graph reaches fewer."""
        separations, items, _ = self._search(points, k)
        if not self._table.scanned.any():
            return separations, items
        rows, near = self._centre.within(points, separations[:, -1])
        return self._rank(points, items, k, rows, near)

    def _search(
        self, points: _Points, k: int
    ) -> tuple[Float64[np.ndarray, "n k"], Int[np.ndarray, "n k"], int]:
        """Like `_nearest`, without the scan; and the number of distances that were computed."""
        spare = max(_SPARE, k // 3) if self._rounded else 0
        listed = min(k + spare, len(self))
        self._index.expansion_search = max(self.candidates * k // NEAREST, self.candidates, listed)
        found = self._index.search(_vectors(points, self.space), listed)
        # For one query, usearch returns arrays of one axis, without those that are missing.
        shape = len(points), -1 if len(points) else listed
        keys = np.asarray(found.keys, np.int64).reshape(shape)
        items = np.searchsorted(self._table.keys, keys)
        counts = np.reshape(getattr(found, "counts", keys.shape[1]), (-1, 1))
        missing = np.arange(keys.shape[1]) >= counts
        items[missing] = -1
        if self._rounded:
            return *self._rank(points, items, k), found.computed_distances
        with np.errstate(invalid="ignore"):  # Those of missing items hold anything.
            separations = np.array(found.distances, np.float64).reshape(shape)
        separations[missing] = np.inf
        order = np.argsort(separations, axis=1, kind="stable")[:, :k]
        nearest = (np.take_along_axis(values, order, axis=1) for values in (separations, items))
        return *nearest, found.computed_distances

    def _rank(self, points: _Points, items: np.ndarray, k: int, *more: np.ndarray) -> _Ranked:
        """Ranks items, [n, m], and more as pairs of row and item, by their exact distances."""
        rows, places = np.nonzero(items >= 0)
        pairs = rows, items[rows, places]
        if more:
            pairs = (np.concatenate(both) for both in zip(pairs, more, strict=True))
        return rank(points, self._table.points, *pairs, k=k, space=self.space)

    @functools.cached_property
    def _centre(self) -> _Centre:
        return _Centre(self._table.points, np.flatnonzero(self._table.scanned), self.space)

    def _replace(self, table: _Table) -> None:
        self._table, self.ids, self.labels = table, table.ids, table.labels
        for cached in ("_centre", "_row_of_path", "_classes"):
            self.__dict__.pop(cached, None)

    def _insert(self, keys: Int[np.ndarray, " n"], points: _Points) -> None:
        # From the centre outwards: a point keeps links to those nearest to it, and points near the
        # centre are near to all. If they came last, they would displace the links among the others.
        order = np.argsort(np.linalg.norm(points, axis=1), kind="stable")
        shown = "points added" if sys.stderr.isatty() else False
        self._index.add(keys[order], _vectors(points[order], self.space), log=shown)

    def _tune(self, sample: Int[np.ndarray, " s"], exact: _Ranked) -> None:
        """Chooses the cheapest setting that finds the exact neighbours of a sample held out."""
        settings: list[_Setting] = []
        points, k = self._table.points[sample], exact[1].shape[1]
        norms = np.linalg.norm(self._table.points, axis=1)
        order = np.lexsort((norms, np.isin(self._table.keys, sample)))  # The sample last.
        places = np.argsort(order)[exact[1]]  # Of the neighbours, in the order from the centre.
        shares = _SCANNED[:1] if isinstance(self.space, Sphere) else _SCANNED
        for candidates in _CANDIDATES:
            self.candidates = candidates
            *found, computed = self._search(points, k)
            cost = computed / max(len(sample), 1)
            hits = found_neighbours(exact, found)
            for scanned in {int(share * len(self)) for share in shares}:
                recall = assured(hits | (places < scanned))
                scan_cost = _SCAN_COST * scanned + _RANK_COST if scanned else 0
                settings.append(_Setting(cost + scan_cost, candidates, scanned, recall))
            best = min((each for each in settings if each.recall >= WANTED), default=None)
            if candidates >= len(self) or (best and best.cost <= cost):
                break
        best = best or max(settings, key=lambda setting: setting.recall)
        self.candidates = best.candidates
        self._table.scanned[order[: best.scanned]] = True
        self.recall = assured(found_neighbours(exact, self._nearest(points, k)))
        self._table.scanned[sample] = norms[sample] <= norms[self._table.scanned].max(initial=-1)
        self._replace(self._table)  # More are scanned.

    def _require_writable(self) -> None:
        if not self._writable:
            raise UserError("the gallery is memory-mapped; open it with writable=True to change it")


def export_usearch(embeddings: Embeddings, path: pathlib.Path) -> str:
    """Builds and writes a `GraphGallery`; returns where it is, and how many neighbours it finds."""
    gallery = GraphGallery.build(embeddings)
    gallery.save(path)
    return f"{path}; it finds {gallery.recall:.1%} of the {NEAREST} nearest neighbours"


def _sample(points: _Points, space: Space) -> tuple[np.ndarray, np.ndarray, _Ranked]:
    """Some points, all others, and the nearest of those to each by an exact search."""
    sample, others = held_out(len(points), len(points), _SAMPLE)
    k = min(NEAREST, len(others))
    items = others[search(points[sample], None, points[others], k=k, space=space)[1]]
    rows = np.repeat(np.arange(len(sample)), k)
    return sample, others, rank(points[sample], points, rows, items.ravel(), k=k, space=space)


def _files(path: pathlib.Path) -> list[pathlib.Path]:
    """The files of the graph, which names all, of the points and of the table."""
    return [path, *(path.with_name(f"{path.name}.{suffix}") for suffix in ("npy", "parquet"))]


def _read_files(path: pathlib.Path) -> tuple[_Table, dict[str, Any]]:
    """Reads the files beside a graph, whose points are memory-mapped, and checks all checksums."""
    if not path.exists():
        raise UserError(f"there is no gallery at {path}")
    columns, facts, recorded = _read_rows(path)
    points = _files(path)[1]
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
    return _Table(*columns, np.load(points, mmap_mode="r")), facts


def _read_rows(path: pathlib.Path) -> tuple[list[np.ndarray], dict[str, Any], list[list[int]]]:
    """Columns of the table, facts of the gallery, and the checksums of the graph and the points."""
    import pyarrow.parquet

    beside = _files(path)[2]
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
        facts = {name: described[name] for name in _TYPES}  # A later version may know more.
        facts["space"] = space_of(facts["space"])
        graph_and_points = facts.pop("checksums")
        recorded = [graph_and_points[name] for name in ("graph", "points")]
        return [keys, np.array(ids, str), np.array(labels, str), scanned], facts, recorded
    except FileNotFoundError as error:
        raise UserError(f"{path} needs its table, {beside}; export it again") from error
    except Exception as error:  # pyarrow raises almost anything on damaged files.
        raise UserError(
            f"the table beside {path} is damaged, or of an earlier version of hypjax; export the "
            "gallery again"
        ) from error


def _schema() -> Any:
    import pyarrow

    types = {"key": "int64", "id": "string", "label": "string", "scanned": "bool"}
    return pyarrow.schema([(name, pyarrow.type_for_alias(kind)) for name, kind in types.items()])


def _checksum(
    described: str, keys: np.ndarray, ids: list[str], labels: list[str], scanned: np.ndarray
) -> str:
    """CRC-32 of a table."""
    parts = [described.encode(), keys.tobytes(), scanned.tobytes()]
    parts += ["\0".join(strings).encode() for strings in (ids, labels)]
    return str(zlib.crc32(b"\0".join(parts)))


def _vectors(points: _Points, space: Space) -> Float32[np.ndarray, "n e"]:
    """Vectors of the graph for points."""
    if isinstance(space, Sphere):
        return points
    points = in_ball(points, space)
    factors = separation_factors(points, space)[:, None]
    return np.concatenate([points, factors], axis=1).astype(np.float32)


def _can_round(points: Float[np.ndarray, "s d"], neighbours: Float[np.ndarray, "s d"]) -> bool:
    """Whether bfloat16 makes searches faster and is fine enough for a graph.

    It is if vectors are long, and the rounding errors of nearly all points are small beside their
    distances from neighbours that a search should find.
    """
    if points.shape[1] < _SHORT or not len(points):
        return False
    lengths, distances = (np.linalg.norm(x, axis=1) for x in (points, points - neighbours))
    return bool(np.mean(_ROUNDING * lengths < _TOLERATED * distances) >= 1 - _MOST)


def _create(space: Space, dim: int, *, rounded: bool) -> Any:
    """An empty graph; a space that `GraphGallery` does not take raises a `UserError`."""
    try:
        import usearch.index
    except ImportError as error:
        raise UserError('a .usearch gallery needs usearch: pip install "hypjax[ann]"') from error
    if isinstance(space, Sphere):
        metric, size = usearch.index.MetricKind.L2sq, dim
    elif space.ball() is not None:
        metric, size = _separation(dim, rounded)[0], dim + 1
    else:
        raise UserError(f"there is no graph for {space}; search the .npz file")
    links, added = _DENSE if dim >= _SHORT else _SPARSE
    return usearch.index.Index(
        ndim=size,
        metric=metric,
        dtype="bf16" if rounded else "f32",
        connectivity=links,
        expansion_add=added,
    )


def _read_graph(index: Any, path: pathlib.Path, *, writable: bool) -> None:
    """Reads the file of a graph into what `_create` returned, or maps it into memory."""
    metric, kind = index.metric, (index.ndim, index.dtype)
    try:
        (index.load if writable else index.view)(str(path))
    except Exception as error:  # usearch raises almost anything.
        raise UserError(f"{path} is damaged; export the gallery again") from error
    if (index.ndim, index.dtype) != kind:
        raise UserError(f"{path} is not the graph that its table describes; export it again")
    index.metric = metric  # The file holds none.


@functools.cache
def _separation(dim: int, rounded: bool) -> tuple[Any, Any]:
    """The separation of two vectors of the graph as a metric of usearch, and its function."""
    try:
        import numba
    except ImportError as error:
        raise UserError('a .usearch gallery needs numba: pip install "hypjax[ann]"') from error
    from usearch.index import CompiledMetric, MetricKind, MetricSignature

    @numba.njit(inline="always")
    def wide(value: Any) -> Any:
        """The float32 whose upper half is given."""
        return np.uint32(value << 16).view(np.float32) if rounded else value

    vector = numba.types.CPointer(numba.types.uint16 if rounded else numba.types.float32)

    @numba.cfunc(numba.types.float32(vector, vector), fastmath={"reassoc", "contract", "nsz"})
    def separation(x: Any, y: Any) -> Any:
        total = numba.types.float32(0)
        for i in range(dim):
            difference = wide(x[i]) - wide(y[i])
            total += difference * difference
        return total * wide(x[dim]) * wide(y[dim])

    metric = CompiledMetric(separation.address, MetricKind.Unknown, MetricSignature.ArrayArray)
    # usearch keeps the function's address alone, so that the cache has to keep the function.
    return metric, separation
