"""Approximate search in a space's own distance: galleries in an HNSW graph of usearch.

Graphs for inner products assume vectors of similar length, which points of a ball are not. So this
graph compares points by their separation ‖x − y‖² / ((1 − c‖x‖²)(1 − c‖y‖²)), of which the distance
2/√c·asinh(√(c·separation)) is an increasing function. A vector of the graph consists of a point and
the factor 1 / (1 − c‖x‖²); on the sphere, of the point only. Points of a space that is isometric to
a ball are compared in that ball.

Searches spend their time reading vectors from memory. So the vectors are rounded to bfloat16, the
upper half of a float32, where that is fine enough to find candidates. The candidates are ranked by
the exact distances of the points.
"""

import dataclasses
import functools
import json
import os
import pathlib
import sys
from collections.abc import Sequence
from typing import Any, Self

import jax
import numpy as np
import pyarrow
import pyarrow.parquet
from jaxtyping import Bool, Float, Float32, Float64, Int

from hypjax.errors import UserError, explained, writing
from hypjax.geometry import Space
from hypjax.geometry.registry import describe_space, space_of
from hypjax.retrieval import euclidean, inputs
from hypjax.retrieval.embeddings import Embeddings
from hypjax.retrieval.euclidean import NEAREST
from hypjax.retrieval.galleries import ArrayGallery
from hypjax.retrieval.neighbors import search
from hypjax.system.files import replacing, sha256, write_json

_FACTS, _GRAPH, _POINTS, _IMAGES = "gallery.json", "graph.usearch", "points.npy", "images.parquet"
# Beside the space and checksums.
_SAVED = ("fingerprint", "rounded", "candidates", "recall", "measured_size")
_SAMPLE = 1000  # Points, at most, whose neighbours are searched for to choose the candidates.
_CANDIDATES = (12, 16, 20, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 256, 384, 512)
_CANDIDATES += (768, 1024, 1536, 2048)
_BLOCK = 4096  # Queries that are compared with strays at once.
_GROWTH = 1.1  # Beyond this many times the images that were measured, a graph is built again.
_SPARSE, _DENSE = (32, 256), (64, 512)  # Links of a point, and candidates when it is added.
_SHORT = 32  # Vectors of fewer coordinates fill few cache lines, so that rounding gains nothing.
_ROUNDING = 2**-9  # Typical relative error of a point in bfloat16.
_TOLERATED = 0.05  # Error of points, as a share of the distances between neighbours.
_MOST = 0.01  # Share of the points whose error may be larger.

_Points = Float32[np.ndarray, "n d"]  # Of a space with a ball, or the sphere.
_Ranked = tuple[Float64[np.ndarray, "n k"], Int[np.ndarray, "n k"]]  # Separations and rows.


@dataclasses.dataclass(eq=False, repr=False)
class GraphGallery(ArrayGallery):
    """A gallery in a graph; see `ArrayGallery`.

    Attributes:
        candidates: Number of candidates of a search for 10 neighbours: more find more of them, and
            take longer. Searches for more neighbours take proportionally more candidates.
        recall: Share of the 10 nearest neighbours that searches for new queries find, at least,
            estimated from a sample that was held out when the graph was built; of the nearest one
            alone, too.
        stray: Which images the graph does not lead to. They are compared with every query.
        measured_size: Images of the graph for which that holds; 0 after a removal.
        writable: Whether the graph is in memory, so that it can change.
    """

    index: Any  # usearch's graph.
    keys: Int[np.ndarray, " n"]  # Of the images in the graph, ascending.
    ids: np.ndarray
    labels: np.ndarray
    vectors: _Points  # May be memory-mapped.
    stray: Bool[np.ndarray, " n"]
    space: Space
    fingerprint: str
    rounded: bool  # Whether the graph's vectors are in bfloat16.
    candidates: int = _CANDIDATES[0]
    recall: float = 1.0
    measured_size: int = 0
    writable: bool = True

    @classmethod
    def build(cls, embeddings: Embeddings) -> Self:
        """Builds a graph, and measures how many of the nearest neighbours searches find.

        The number of candidates is the smallest that finds 98% of the 10 nearest of a sample, which
        is inserted afterwards. If none does, a warning says how many are found. Raises a
        `UserError` if the space is neither isometric to a ball nor the sphere.
        """
        points, space, dim = embeddings.vectors, embeddings.space, embeddings.vectors.shape[1]
        euclidean.curvature(space)  # Raises an error for other spaces.
        sample, others = euclidean.held_out(len(points), len(points), _SAMPLE)
        k = min(NEAREST, len(others))
        items = others[search(points[sample], None, points[others], k=k, space=space)[1]]
        rows = np.repeat(np.arange(len(sample)), k)
        exact = euclidean.rank(points[sample], points, rows, items.ravel(), k=k, space=space)
        neighbours = points[sample], points[exact[1][:, -1]]
        rounded = _can_round(*(euclidean.in_ball(x, space) for x in neighbours))
        index = _create(space, dim, rounded=rounded)
        columns = np.arange(len(points)), embeddings.ids, embeddings.labels, points
        stray = np.zeros(len(points), bool)
        gallery = cls(index, *columns, stray, space, embeddings.fingerprint, rounded)
        gallery._insert(others, points[others])
        gallery._tune(points[sample], exact)
        gallery._mark_strays(others)
        gallery._tune(points[sample], tuple(array[:, :1] for array in exact))
        gallery._insert(sample, points[sample])
        gallery._mark_strays(np.arange(len(points)))
        gallery.measured_size = len(points)
        return gallery

    def _tune(self, queries: _Points, exact: _Ranked) -> None:
        """Raises the candidates until searches find these neighbours; lowers `recall` to that."""

        def search_with(candidates: int) -> _Ranked:
            self.candidates = candidates
            return self._ranked(queries, exact[1].shape[1])

        numbers = [number for number in _CANDIDATES if number >= self.candidates]
        self.recall = min(self.recall, euclidean.tune(search_with, exact, numbers))

    def _mark_strays(self, rows: Int[np.ndarray, " r"]) -> None:
        """Marks images that searches for themselves miss."""
        for block in inputs.blocks(len(rows), _BLOCK):
            separations, nearest = self._ranked(self.vectors[rows[block]], 1)
            self.stray[rows[block]] |= (nearest[:, 0] != rows[block]) & (separations[:, 0] > 0)

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, writable: bool = False) -> Self:
        """Opens a gallery's folder; raises a `UserError` if it is missing or damaged.

        With `writable`, the graph is read into memory, so that it can change. Otherwise its file is
        memory-mapped.
        """
        path = pathlib.Path(path)
        if not path.exists():
            raise UserError(f"there is no gallery at {path}")
        problem = f"{path} is damaged, or no gallery of usearch"
        with explained(problem, "; export the gallery again"):
            facts = json.loads((path / _FACTS).read_text())
            for name, expected in facts.pop("checksums").items():  # usearch crashes on damage.
                if sha256(path / name) != expected:
                    raise ValueError(f"the checksum of {name} is wrong")
            facts["space"] = space_of(facts["space"])
            rows = pyarrow.parquet.read_table(path / _IMAGES)
            ids, labels = (np.array(rows[name].to_pylist(), str) for name in ("id", "label"))
            points = np.load(path / _POINTS, mmap_mode="r")
            index = _create(facts["space"], points.shape[1], rounded=facts["rounded"])
            metric = index.metric
            (index.load if writable else index.view)(str(path / _GRAPH))
            index.metric = metric  # The file holds none.
        keys, stray = (np.array(rows[name]) for name in ("key", "stray"))
        return cls(index, keys, ids, labels, points, stray, **facts, writable=writable)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes or replaces a folder with the graph, the points and a table of images.

        A process that is killed leaves the old gallery or the new one. Raises a `UserError` if a
        file cannot be written, or the folder holds other files.
        """
        path = pathlib.Path(path)
        if path.is_dir() and {x.name for x in path.iterdir()} - {_FACTS, _GRAPH, _POINTS, _IMAGES}:
            raise UserError(f"{path} holds files that are no gallery's; name another folder")
        columns = {"key": self.keys, "id": self.ids.tolist(), "label": self.labels.tolist()}
        columns["stray"] = self.stray
        with writing(path), replacing(path) as folder:
            folder.mkdir()
            try:
                self.index.save(str(folder / _GRAPH))
            except RuntimeError as error:  # As usearch reports a full disk.
                raise OSError(str(error)) from error
            np.save(folder / _POINTS, self.vectors)
            pyarrow.parquet.write_table(pyarrow.table(columns), folder / _IMAGES)
            facts = {name: getattr(self, name) for name in _SAVED}
            facts["space"] = describe_space(self.space)
            facts["checksums"] = {n: sha256(folder / n) for n in (_GRAPH, _POINTS, _IMAGES)}
            write_json(folder / _FACTS, facts)

    def add(self, embeddings: Embeddings) -> None:
        """Adds images that the same model embedded, and that are not in the gallery yet.

        The graph is built again if images were removed, whose places usearch would give to the new
        ones together with links to the old, or if it has grown by a tenth since it was measured.
        """
        self._require_writable()
        embeddings.check()
        if embeddings.fingerprint != self.fingerprint:
            raise UserError("the images were embedded by another model; embed them with this one")
        known = np.isin(embeddings.ids, self.ids)
        if known.any():
            raise UserError(f"{embeddings.ids[known][0]} is in the gallery; remove it first")
        keys = np.arange(len(embeddings)) + (self.keys[-1] + 1 if len(self) else 0)
        stray = np.zeros(len(keys), bool)
        added = keys, embeddings.ids, embeddings.labels, embeddings.vectors, stray
        columns = [*map(np.concatenate, zip(self._columns(), added, strict=True))]
        if len(columns[0]) > _GROWTH * self.measured_size:
            _, ids, labels, points, _ = columns
            changed = Embeddings(points, ids, labels, self.space, self.fingerprint)
            vars(self).update(vars(self.build(changed)))
            self.forget_images()
        else:
            self._insert(keys, embeddings.vectors)
            self._set(*columns)
            self._mark_strays(np.arange(len(self)))  # New links displace old ones.

    def remove(self, ids: Sequence[str]) -> None:
        """Removes images of the gallery."""
        self._require_writable()
        missing = np.setdiff1d(ids, self.ids)
        if len(missing):
            raise UserError(f"{missing[0]} is not in the gallery")
        removed = np.isin(self.ids, ids)
        if removed.any():
            self.index.remove(self.keys[removed])
            self.measured_size = 0
        self._set(*(column[~removed] for column in self._columns()))

    def search_rows(
        self, points: Float32[np.ndarray, "q d"], k: int
    ) -> tuple[Float32[np.ndarray, "q k"], Int[np.ndarray, "q k"]]:
        """Distances and rows of the k nearest images; −1 where the graph reaches fewer."""
        self.space.check(points)
        separations, rows = self._ranked(points, k)
        with jax.enable_x64(True):
            distances = np.asarray(self.space.distance_at(separations))
        return distances.astype(np.float32), rows

    def _ranked(self, points: _Points, k: int) -> _Ranked:
        """Separations and rows of the nearest images: infinite, and −1, for no image."""
        # All candidates are ranked, since the nearest by rounded vectors may not be the nearest.
        listed = min(max(self.candidates * k // NEAREST, self.candidates), len(self))
        self.index.expansion_search = listed
        found = self.index.search(_vectors(points, self.space), listed)
        # For one query, usearch returns arrays of one axis, without missing images.
        keys = np.asarray(found.keys, np.int64).reshape(len(points), -1 if len(points) else listed)
        counts = np.reshape(getattr(found, "counts", keys.shape[1]), (-1, 1))
        queries, places = np.nonzero(np.arange(keys.shape[1]) < counts)
        rows = np.searchsorted(self.keys, keys[queries, places])
        strays = self._nearest_strays(points, listed)
        queries = np.concatenate([queries, np.repeat(np.arange(len(points)), strays.shape[1])])
        rows = np.concatenate([rows, strays.ravel()])
        return euclidean.rank(points, self.vectors, queries, rows, k=k, space=self.space)

    def _nearest_strays(self, points: _Points, most: int) -> Int[np.ndarray, "q m"]:
        """Rows of the strays that are nearest to each query, in any order."""
        strays = np.flatnonzero(self.stray)
        if len(strays) <= most:
            return np.tile(strays, (len(points), 1))
        items = euclidean.in_ball(self.vectors[strays], self.space).astype(np.float64)
        factors = euclidean.separation_factors(items, self.space)
        nearest = np.empty((len(points), most), int)
        for block in inputs.blocks(len(points), _BLOCK):
            queries = euclidean.in_ball(points[block], self.space).astype(np.float64)
            squares = np.sum(queries**2, axis=1)[:, None] + np.sum(items**2, axis=1)
            separations = (squares - 2 * queries @ items.T) * factors
            nearest[block] = strays[np.argpartition(separations, most, axis=1)[:, :most]]
        return nearest

    def _columns(self) -> tuple[np.ndarray, ...]:
        return self.keys, self.ids, self.labels, self.vectors, self.stray

    def _set(self, *columns: np.ndarray) -> None:
        self.keys, self.ids, self.labels, self.vectors, self.stray = columns
        self.forget_images()

    def _insert(self, keys: Int[np.ndarray, " n"], points: _Points) -> None:
        # From the centre outwards: a point keeps links to those nearest to it, and points near the
        # centre are near to all. If they came last, they would displace the links among the others.
        order = np.argsort(np.linalg.norm(points, axis=1), kind="stable")
        shown = "points added" if sys.stderr.isatty() else False
        # Threads that add points at once may leave some without links to them: of 8,000 points in 8
        # coordinates at c = 1, two threads lost 28, which no number of candidates finds.
        self.index.add(keys[order], _vectors(points[order], self.space), log=shown, threads=1)

    def _require_writable(self) -> None:
        if not self.writable:
            raise UserError("the gallery is memory-mapped; open it with writable=True to change it")


def export_usearch(embeddings: Embeddings, path: pathlib.Path) -> str:
    """Builds and writes a `GraphGallery`; returns where it is, and how many neighbours it finds."""
    gallery = GraphGallery.build(embeddings)
    gallery.save(path)
    return f"{path}; it finds {gallery.recall:.1%} of the {NEAREST} nearest neighbours"


def _vectors(points: _Points, space: Space) -> Float32[np.ndarray, "n e"]:
    if space.ball() is None:
        return points
    points = euclidean.in_ball(points, space)
    factors = euclidean.separation_factors(points, space)[:, None]
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
    """An empty graph for a space that is isometric to a ball, or else the sphere."""
    import usearch.index

    if space.ball() is None:
        metric, size = usearch.index.MetricKind.L2sq, dim
    else:
        metric, size = _separation(dim, rounded)[0], dim + 1
    links, added = _DENSE if dim >= _SHORT else _SPARSE
    return usearch.index.Index(
        ndim=size,
        metric=metric,
        dtype="bf16" if rounded else "f32",
        connectivity=links,
        expansion_add=added,
    )


@functools.cache
def _separation(dim: int, rounded: bool) -> tuple[Any, Any]:
    """The separation of two vectors of the graph as a metric of usearch, and its function."""
    import numba
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
