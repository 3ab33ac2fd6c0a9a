"""Approximate search in a space's own distance: galleries in an HNSW graph of usearch.

Graphs for inner products assume vectors of similar length, which points of a ball are not. So this
graph compares points by their separation ‖x − y‖² / ((1 − c‖x‖²)(1 − c‖y‖²)); the distance
2/√c·asinh(√(c·separation)) increases with it. A vector of the graph is a point with the factor
1 / (1 − c‖x‖²); on the sphere, only the point. Spaces isometric to a ball are compared in the ball.

Searches spend their time reading vectors, which are rounded to bfloat16, the upper half of a
float32, where that is fine enough to find candidates. Exact distances rank the candidates.
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
_SAVED = ("fingerprint", "model", "rounded", "candidates", "recall")  # Fields in gallery.json.
_SAMPLE = 1000  # Points, at most, whose neighbours are searched for to choose the candidates.
_CANDIDATES = (12, 16, 20, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 256, 384, 512)
_CANDIDATES += (768, 1024, 1536, 2048)
_REACHING = 64  # Candidates by which an image should find itself before they are chosen.
_BLOCK = 4096  # Images that are searched for at once.
_MOST_ADDED = 0.1  # Added images, as a share of those in the graph, before it is built again.
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
        candidates: Candidates of a search for 10 neighbours, and proportionally more for more
            neighbours. More candidates find more neighbours, and take longer.
        recall: Lower bound on the share of the 10 nearest neighbours, and of the nearest one, that
            searches for new queries find, from a sample that was held out of the graph.
        stray: Images that searches of the graph miss: those without links to them, and those added
            since it was built. They are compared with every query.
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
    candidates: int = _REACHING
    recall: float = 1.0
    model: str = ""
    writable: bool = True

    @classmethod
    def build(cls, embeddings: Embeddings) -> Self:
        """Builds a graph, and measures how many of the nearest neighbours searches find.

        It takes the fewest candidates that find 98% of the 10 nearest of a sample, which is
        inserted afterwards; if none do, a warning says how many are found. Raises a `UserError` if
        the space is neither isometric to a ball nor the sphere.
        """
        points, space, dim = embeddings.vectors, embeddings.space, embeddings.vectors.shape[1]
        euclidean.curvature(space)  # Checks the space.
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
        gallery.model = embeddings.model
        gallery._insert(others, points[others])
        gallery._mark_strays(others)

        def search_sample(candidates: int) -> _Ranked:
            gallery.candidates = candidates
            return gallery._ranked(points[sample], k)

        gallery.recall = euclidean.tune(search_sample, exact, _CANDIDATES)
        gallery._insert(sample, points[sample])
        gallery._mark_strays(gallery.keys)
        return gallery

    def _mark_strays(self, rows: Int[np.ndarray, " r"]) -> None:
        """Marks images of the graph that find neither themselves nor a copy."""
        for block in inputs.split(rows, _BLOCK):
            separations, nearest = self._ranked(self.vectors[block], 1)
            self.stray[block] |= (nearest[:, 0] != block) & (separations[:, 0] > 0)

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, writable: bool = False) -> Self:
        """Opens a gallery's folder; raises a `UserError` if it is missing or damaged.

        With `writable`, the graph is read into memory to be changed, instead of memory-mapped.
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

        A killed process leaves the old gallery or the new one. Raises a `UserError` if a file
        cannot be written, or the folder holds other files.
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

        Every query is compared with them until they are a tenth of the graph's images; then the
        graph is built again. Inserted into the old one, they would displace links, and usearch
        would give them the slots of removed images, to which other links lead.
        """
        columns = self._columns()
        embeddings.check()
        if embeddings.fingerprint != self.fingerprint:
            raise UserError("the images were embedded by another model; embed them with this one")
        if (known := np.isin(embeddings.ids, self.ids)).any():
            raise UserError(f"{embeddings.ids[known][0]} is in the gallery; remove it first")
        keys = np.arange(len(embeddings)) + (self.keys[-1] + 1 if len(self) else 0)
        stray = np.ones(len(keys), bool)
        added = keys, embeddings.ids, embeddings.labels, embeddings.vectors, stray
        self._set(*map(np.concatenate, zip(columns, added, strict=True)))
        if len(self) > (1 + _MOST_ADDED) * len(self.index):
            images = self.vectors, self.ids, self.labels, self.space, self.fingerprint
            vars(self).update(vars(self.build(Embeddings(*images, model=self.model))))

    def remove(self, ids: Sequence[str]) -> None:
        """Removes images of the gallery; searches pass over them on their way through the graph."""
        columns, missing = self._columns(), np.setdiff1d(ids, self.ids)
        if len(missing):
            raise UserError(f"{missing[0]} is not in the gallery")
        removed = np.isin(self.ids, ids)
        self.index.remove(self.keys[removed])
        self._set(*(column[~removed] for column in columns))

    def search_rows(
        self, points: Float32[np.ndarray, "q d"], k: int
    ) -> tuple[Float32[np.ndarray, "q k"], Int[np.ndarray, "q k"]]:
        """Distances and rows of the k nearest images; −1 where the graph reaches fewer."""
        self.space.check(points)
        if not len(self):
            raise UserError("the gallery has no images any more; add some, or export it again")
        separations, rows = self._ranked(points, k)
        with jax.enable_x64(True):
            distances = np.asarray(self.space.distance_at(separations))
        return distances.astype(np.float32), rows

    def _ranked(self, points: _Points, k: int) -> _Ranked:
        """Separations and rows of the nearest images: infinite, and −1, for no image."""
        # All candidates are ranked: the nearest rounded vectors may not be the nearest points.
        listed = min(max(self.candidates * k // NEAREST, self.candidates), len(self))
        self.index.expansion_search = listed
        vectors = _vectors(points, self.space)
        queries, keys = _pairs(self.index.search(vectors, listed), len(points))
        rows = np.searchsorted(self.keys, keys)
        stray_queries, stray_rows = self._nearest_strays(vectors, listed)
        queries, rows = np.append(queries, stray_queries), np.append(rows, stray_rows)
        return euclidean.rank(points, self.vectors, queries, rows, k=k, space=self.space)

    def _nearest_strays(
        self, vectors: Float32[np.ndarray, "q e"], most: int
    ) -> tuple[Int[np.ndarray, " p"], Int[np.ndarray, " p"]]:
        import usearch.index

        strays = np.flatnonzero(self.stray)
        if not (len(strays) and len(vectors)):
            return strays, strays
        among = _vectors(self.vectors[strays], self.space)
        metric, most = _metric(self.space, self.vectors.shape[1]), min(most, len(strays))
        matches = usearch.index.search(among, vectors, most, metric, exact=True)
        queries, items = _pairs(matches, len(vectors))
        return queries, strays[items]

    def _columns(self) -> tuple[np.ndarray, ...]:
        if not self.writable:
            raise UserError("the gallery is memory-mapped; open it with writable=True to change it")
        return self.keys, self.ids, self.labels, self.vectors, self.stray

    def _set(self, *columns: np.ndarray) -> None:
        self.keys, self.ids, self.labels, self.vectors, self.stray = columns
        self.forget_images()

    def _insert(self, keys: Int[np.ndarray, " n"], points: _Points) -> None:
        # From the centre outwards: a point keeps links to those nearest to it, and points near the
        # centre are near to all. If they came last, they would displace the links among the others.
        order = np.argsort(np.linalg.norm(points, axis=1), kind="stable")
        log = "points added" if sys.stderr.isatty() else False
        # Threads that add points at once may leave some without links to them: of 8,000 points in 8
        # coordinates at c = 1, two threads lost 28, which no number of candidates finds.
        self.index.add(keys[order], _vectors(points[order], self.space), log=log, threads=1)


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
    """Whether bfloat16 makes searches faster, and its errors are small beside the distances."""
    if points.shape[1] < _SHORT or not len(points):
        return False
    lengths, distances = (np.linalg.norm(x, axis=1) for x in (points, points - neighbours))
    return bool(np.mean(_ROUNDING * lengths < _TOLERATED * distances) >= 1 - _MOST)


def _pairs(matches: Any, queries: int) -> tuple[Int[np.ndarray, " p"], Int[np.ndarray, " p"]]:
    if not queries:
        return np.empty(0, int), np.empty(0, int)
    # For one query, usearch returns arrays of one axis, without missing images.
    keys = np.asarray(matches.keys, np.int64).reshape(queries, -1)
    counts = np.reshape(getattr(matches, "counts", keys.shape[1]), (-1, 1))
    rows, columns = np.nonzero(np.arange(keys.shape[1]) < counts)
    return rows, keys[rows, columns]


def _metric(space: Space, dim: int, rounded: bool = False) -> Any:
    from usearch.index import MetricKind

    return MetricKind.L2sq if space.ball() is None else _separation(dim, rounded)[0]


def _create(space: Space, dim: int, *, rounded: bool) -> Any:
    import usearch.index

    links, added = _DENSE if dim >= _SHORT else _SPARSE
    return usearch.index.Index(
        ndim=dim + (space.ball() is not None),
        metric=_metric(space, dim, rounded),
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
    # usearch keeps only the function's address, so the cache must keep the function.
    return metric, separation
