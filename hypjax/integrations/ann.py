"""Search of large galleries by a space's own distance, in the index that takes the least time.

Near the boundary of a ball, this is a tree of boxes and gaps, whose searches are exact, see
`hypjax.retrieval.box_tree`. Elsewhere it is an HNSW graph of usearch, whose are approximate.

Graphs for inner products need vectors of similar length, unlike points of a ball. So this graph
compares points by their separation ‖x − y‖² / ((1 − c‖x‖²)(1 − c‖y‖²)); the distance
2/√c·asinh(√(c·separation)) increases with the separation. Each vector of the graph holds a point
and the factor 1 / (1 − c‖x‖²); on the sphere, only the point. Points of spaces isometric to a ball
are mapped into the ball.

Searches spend most of their time reading vectors. So these are rounded to bfloat16, the upper half
of a float32, where that is fine enough to find candidates. Exact distances rank the candidates.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import re
import sys
from typing import Any, Self

import numba
import numpy as np
import pyarrow
import pyarrow.parquet
from jaxtyping import Bool, Float32, Int
from usearch import index as usearch_index

from hypjax.errors import UserError, explained, writing
from hypjax.galleries.embeddings import Embeddings
from hypjax.galleries.search import ArrayGallery
from hypjax.geometry import Space
from hypjax.geometry.registry import describe_space, space_of
from hypjax.retrieval import euclidean, inputs, subtraction
from hypjax.retrieval.box_tree import LARGEST, BoxTree
from hypjax.retrieval.euclidean import NEAREST
from hypjax.retrieval.inputs import Rows
from hypjax.retrieval.neighbors import search
from hypjax.retrieval.selection import StreamedGallery
from hypjax.system import files

# A gallery's folder holds its facts, and a folder that they name, with the other files of one
# export. A reader sees the files of one export only, although the next one removes them.
_FACTS, _GRAPH, _POINTS, _IMAGES = "gallery.json", "graph.usearch", "points.npy", "images.parquet"
_NEW = "export"  # Name of an export's folder until its files have a hash.
_OWN_NAME = re.compile(
    rf"[0-9a-f]{{16}}|\..*\.(unfinished|previous)|{_NEW}|{_FACTS}|{_GRAPH}|{_POINTS}|{_IMAGES}"
)
_ATTEMPTS = 10  # At opening a gallery that others export again.
_SAMPLED_QUERIES = 1000  # Largest number of held-out queries that choose the number of candidates.
_CANDIDATES = (  # Numbers of candidates to choose from.
    *(*range(12, 25, 4), *range(32, 65, 8), *range(80, 129, 16)),
    *(160, 192, 256, 384, 512, 768, 1024, 1536, 2048),
)
_STRAY_CANDIDATES = 64  # An image that does not find itself among so many is a stray.
_STRAY_SHARE = 0.01  # With a larger share of strays, other links are tried,
_PART = 5000  # first on so many images.
# Exponents of the ratio of gaps, see `_compile_separation`, and orders of insertion: from the
# centre of the ball outwards (1), or inwards (-1).
_LINKS = ((0.0, 1), (0.0, -1), (0.5, 1), (1.0, 1))
_TREE_SEPARATIONS = 1500  # A search of a graph computes about as many, or more.
_BLOCK = 4096  # Images to search for at once.
# Links of a point, and candidates when a point is added, for short and for long vectors.
_SPARSE, _DENSE = (32, 256), (64, 512)
_LONG_DIM = 32  # Dimension from which vectors fill several cache lines, so rounding saves time.
_ROUNDING = 2**-9  # Typical relative error of a point in bfloat16.
_TOLERANCE = 0.05  # Largest rounding error of a point, as a share of the distance to a neighbour.
_EXCEPTION_SHARE = 0.01  # Share of the points whose rounding error may be larger.

_Points = Float32[np.ndarray, "n d"]  # In the sphere, or in a space isometric to a ball.
_Pairs = tuple[Int[np.ndarray, " p"], Int[np.ndarray, " p"]]  # Query indices, gallery rows.


@dataclasses.dataclass(eq=False, repr=False)
class IndexedGallery(ArrayGallery):
    """A gallery in a tree or an HNSW graph; see `ArrayGallery`. All but `index` are of graphs only.

    Attributes:
        index: A tree, or usearch's graph, whose keys are the rows of the images.
        stray: Marks images that the graph does not lead to; each search scans them.
        first: Row of the first image at each image's point; only these are in the graph.
        rounded: Whether the graph's vectors are in bfloat16.
        candidates: Number of candidates in a search for 10 neighbours, in proportion for more. More
            candidates find more neighbours, and take longer.
        recall: Lower bound on the share of neighbours that searches for new queries find, see
            `build`.
    """

    index: Any
    ids: np.ndarray
    labels: np.ndarray
    vectors: _Points  # May be memory-mapped.
    stray: Bool[np.ndarray, " n"]
    first: Int[np.ndarray, " n"]
    space: Space
    fingerprint: str
    rounded: bool = False
    candidates: int = _STRAY_CANDIDATES
    recall: float = 1.0
    model: str = ""
    noun: str = "image"

    @classmethod
    def build(cls, embeddings: Embeddings) -> Self:
        """Builds a tree if its searches take little, otherwise a graph, and measures its recall.

        Searches for sampled points, which are held out of the graph with their copies, choose the
        fewest candidates that find 98% of the 10 nearest neighbours; a warning tells if no number
        does. Then the sample is added. Raises a `UserError` if the space is neither isometric to a
        ball nor the sphere.
        """
        points, space = embeddings.vectors, embeddings.space
        euclidean.curvature(space)  # Checks the space.
        numbers = subtraction.unique_rows(points)[1]
        first = np.unique(numbers, return_index=True)[1][numbers]
        distinct = np.unique(first)
        parts = euclidean.sample_queries(len(distinct), len(distinct), _SAMPLED_QUERIES)
        sample_rows, graph_rows = (distinct[part] for part in parts)
        other_rows = np.flatnonzero(np.isin(first, graph_rows))
        sample = points[sample_rows]
        gallery = cls(
            None,
            embeddings.ids,
            embeddings.labels,
            points,
            np.zeros(len(points), bool),
            first,
            space,
            embeddings.fingerprint,
            model=embeddings.model,
            noun=embeddings.noun,
        )
        if space.ball() is not None and points.size <= LARGEST:
            gallery.index = BoxTree.build(points, space)
            if len(points) <= _TREE_SEPARATIONS:
                return gallery
            if gallery.index.cost(sample, NEAREST) <= _TREE_SEPARATIONS:
                return gallery
        k = min(NEAREST, len(other_rows))
        _, neighbours = search(sample, None, points[other_rows], k=k, space=space)
        pairs = np.repeat(np.arange(len(sample)), k), other_rows[neighbours].ravel()
        exact = euclidean.rank(sample, points, *pairs, k=k, space=space)
        gallery.rounded = _can_round(sample, points[exact[1][:, -1]], space)
        links = gallery._link(graph_rows)

        def search_sample(candidates: int) -> inputs.Nearest:
            gallery.candidates = candidates
            return gallery._search(sample, k, candidates)

        gallery.recall = euclidean.tune(search_sample, exact, _CANDIDATES)
        gallery._insert(sample_rows, *links)
        gallery._mark_strays(distinct)
        return gallery

    def _mark_strays(self, rows: Int[np.ndarray, " r"]) -> None:
        """Marks images of the graph that do not find themselves."""
        candidates = max(self.candidates, _STRAY_CANDIDATES)
        for block in inputs.split(rows, _BLOCK):
            _, nearest = self._search(self.vectors[block], 1, candidates)
            self.stray[block] |= nearest[:, 0] != block

    def _link(self, rows: Int[np.ndarray, " r"]) -> tuple[float, int]:
        """Makes the graph of these rows, and returns those of `_LINKS` that leave few strays."""
        first, *others = _LINKS
        attempts, most = [self._attempt(rows, first)], _STRAY_SHARE * len(rows)
        if attempts[0][0] <= most or self.space.ball() is None:
            others = []
        elif len(rows) > _PART:  # A part excludes most links, in a small part of the time.
            part = np.random.default_rng(0).permutation(rows)[:_PART]
            allowed = self._attempt(part, first)[0]
            others = [links for links in others if self._attempt(part, links)[0] <= allowed]
        for links in others:
            attempts.append(self._attempt(rows, links))
            if attempts[-1][0] <= most:
                break
        _, links, self.index, self.stray = min(attempts, key=lambda attempt: attempt[0])
        return links

    def _attempt(self, rows: Int[np.ndarray, " r"], links: tuple[float, int]) -> tuple:
        """Makes the graph of these rows; returns their number of strays, links, graph, strays."""
        self.index = _create_index(self.space, self.vectors.shape[1], rounded=self.rounded)
        self.stray = np.zeros(len(self), bool)
        self._insert(rows, *links)
        self._mark_strays(rows)
        return int(self.stray.sum()), links, self.index, self.stray

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Self:
        """Opens a gallery's folder; raises a `UserError` if it is missing or damaged."""
        path = pathlib.Path(path)
        problem = f"{path} is damaged, or not written by --export=ann"
        with explained(problem, "; export the gallery again"):
            for _ in range(_ATTEMPTS):  # Another process may export newer files.
                with contextlib.suppress(OSError, RuntimeError):
                    return cls._read(path)
            return cls._read(path)

    @classmethod
    def _read(cls, path: pathlib.Path) -> Self:
        facts = files.check_json(json.loads((path / _FACTS).read_text(encoding="utf-8")))
        folder = path / facts.pop("export")
        files.check_files(folder, facts.pop("checksums"))  # usearch crashes on damaged files.
        facts["space"] = space_of(facts["space"])
        rows = pyarrow.parquet.read_table(folder / _IMAGES)
        ids, labels = (np.array(rows[name].to_pylist(), str) for name in ("id", "label"))
        points = np.load(folder / _POINTS, mmap_mode="r")
        stray, first = np.array(rows["stray"]), np.array(rows["first"])
        if facts.pop("index") == "tree":
            index = BoxTree.build(points, facts["space"])
        else:
            index = _create_index(facts["space"], points.shape[1], rounded=facts["rounded"])
            metric = index.metric
            index.view(str(folder / _GRAPH))
            index.metric = metric  # The file does not hold the metric.
        return cls(index, ids, labels, points, stray, first, **facts)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a folder with the graph, the points and a table of images, or replaces it at once.

        Raises a `UserError` if a file cannot be written, or the folder holds other files.
        """
        path = pathlib.Path(path)
        names = [file.name for file in path.iterdir()] if path.is_dir() else []
        if not all(map(_OWN_NAME.fullmatch, names)):
            raise UserError(f"{path} holds other files than a gallery's; name another folder")
        columns = {"id": self.ids.tolist(), "label": self.labels.tolist(), "stray": self.stray}
        columns["first"] = self.first
        fields = ("fingerprint", "model", "noun", "rounded", "candidates", "recall")
        facts = {x: getattr(self, x) for x in fields} | {"space": describe_space(self.space)}
        facts["index"] = "tree" if isinstance(self.index, BoxTree) else "graph"
        with writing(path), files.locked(path, f"writing {path}", beside=True):
            path.mkdir(exist_ok=True)
            with files.replacing(path / _NEW) as staged:
                staged.mkdir()
                try:
                    if not isinstance(self.index, BoxTree):  # Which takes less time to build.
                        self.index.save(str(staged / _GRAPH))
                except RuntimeError as error:  # usearch's error when the disk is full.
                    raise OSError(str(error)) from error
                np.save(staged / _POINTS, np.ascontiguousarray(self.vectors))
                pyarrow.parquet.write_table(pyarrow.table(columns), staged / _IMAGES)
                checksums = {x.name: files.sha256(x) for x in sorted(staged.iterdir())}
            folder = path / hashlib.sha256(json.dumps(checksums).encode()).hexdigest()[:16]
            try:  # Others may read an intact folder, so it stays.
                files.check_files(folder, checksums)
            except (OSError, ValueError):
                files.remove(folder)
                (path / _NEW).rename(folder)
            facts |= {"checksums": checksums, "export": folder.name}
            files.write_json(path / _FACTS, files.with_checksum(facts))
            for other in path.iterdir():
                if other.name not in (_FACTS, folder.name):
                    files.remove(other)

    def search_rows(self, points: inputs.Points, k: int) -> inputs.Nearest:
        """Distances and rows of the k nearest images; row −1 where the graph reaches fewer."""
        if isinstance(self.index, BoxTree):
            return search(points, None, self.kept_vectors, k=k, space=self.space)
        self.space.check(points)
        separations, rows = self._search(points, k, self.candidates)
        return subtraction.distances(self.space, separations), rows

    @functools.cached_property
    def kept_vectors(self) -> StreamedGallery:
        """The points, with the tree that answers all searches."""
        return StreamedGallery(self.vectors, keep=True, tree=self.index)

    def _search(self, points: _Points, k: int, candidates: int) -> inputs.Nearest:
        """Separations and rows of the nearest images; ∞ and −1 where there are fewer than k."""
        num_candidates = min(max(candidates * k // NEAREST, candidates), len(self))
        self.index.expansion_search = num_candidates
        vectors = _graph_vectors(points, self.space)
        pairs = _matched_pairs(self.index.search(vectors, num_candidates))
        found = np.concatenate([pairs, self._nearest_strays(vectors, k)], axis=1)
        queries, rows = self._with_copies(found[0], found[1], k)
        # The nearest rounded vectors may not be the nearest points, so exact distances rank them.
        return euclidean.rank(points, self.vectors, queries, rows, k=k, space=self.space)

    def _nearest_strays(self, vectors: Float32[np.ndarray, "q e"], k: int) -> _Pairs:
        """Pairs of each query and the k strays nearest to its vector, by a scan."""
        strays = np.flatnonzero(self.stray)
        if not (len(strays) and len(vectors)):
            return np.empty(0, int), np.empty(0, int)
        stray_vectors = _graph_vectors(self.vectors[strays], self.space)
        metric = _metric(self.space, self.vectors.shape[1], rounded=False)
        k = min(k, len(strays))
        matches = usearch_index.search(stray_vectors, vectors, k, metric, exact=True)
        queries, items = _matched_pairs(matches)
        return queries, strays[items]

    def _with_copies(self, queries: Rows, rows: Rows, k: int) -> _Pairs:
        """Replaces the graph's images in pairs by the first k images at their points."""
        # Were copies in the graph, they would fill each other's links and a search's candidates.
        order, starts, counts = self._copies
        counts = np.minimum(counts[rows], k)
        if counts.max(initial=1) == 1:
            return queries, rows
        positions = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        return np.repeat(queries, counts), order[np.repeat(starts[rows], counts) + positions]

    @functools.cached_property
    def _copies(self) -> tuple[Rows, Rows, Rows]:
        """Rows sorted by point; where in them the copies of each row start, and how many."""
        counts = np.bincount(self.first, minlength=len(self))
        return np.argsort(self.first, kind="stable"), np.cumsum(counts) - counts, counts

    def _insert(self, rows: Int[np.ndarray, " r"], penalty: float, order: int) -> None:
        # Points near the centre are near to all. Added last, they may displace links among others;
        # added first, they may be the only ones to which others, equally far from them, are linked.
        norms = np.linalg.norm(self.vectors[rows], axis=1)
        rows = rows[np.argsort(order * norms, kind="stable")]
        # With several threads, some points may get no links to them: of 8,000 points in 8
        # coordinates at c = 1, two threads lost 28, which no number of candidates finds.
        vectors, dim = _graph_vectors(self.vectors[rows], self.space), self.vectors.shape[1]
        self.index.metric = _metric(self.space, dim, rounded=self.rounded, penalty=penalty)
        self.index.add(rows, vectors, log=sys.stderr.isatty() and "points added", threads=1)
        self.index.metric = _metric(self.space, dim, rounded=self.rounded)


def export_ann(embeddings: Embeddings, path: pathlib.Path) -> str:
    """Builds and writes an `IndexedGallery`; returns its path, index and recall, as a sentence."""
    gallery = IndexedGallery.build(embeddings)
    gallery.save(path)
    if isinstance(gallery.index, BoxTree):
        return f"{path}, a tree; its searches are exact"
    return f"{path}, a graph; it finds {gallery.recall:.1%} of the {NEAREST} nearest neighbours"


def _graph_vectors(points: _Points, space: Space) -> Float32[np.ndarray, "n e"]:
    """Points as the graph's vectors, with their factor in separations as last coordinate."""
    if space.ball() is None:
        return points
    points = euclidean.in_ball(points, space)
    factors = euclidean.separation_factors(points, space)[:, None]
    return np.concatenate([points, factors], axis=1).astype(np.float32)


def _can_round(points: _Points, neighbours: _Points, space: Space) -> bool:
    """Whether rounding makes searches faster, with errors far below distances to neighbours."""
    if points.shape[1] < _LONG_DIM or not len(points):
        return False
    points = euclidean.in_ball(points, space)
    errors = _ROUNDING * np.linalg.norm(points, axis=1)
    distances = np.linalg.norm(points - euclidean.in_ball(neighbours, space), axis=1)
    return bool(np.mean(errors < _TOLERANCE * distances) >= 1 - _EXCEPTION_SHARE)


def _matched_pairs(matches: Any) -> _Pairs:
    """Unpacks usearch's matches into pairs of a query and a row."""
    # For a single query, usearch returns arrays of one axis, without missing images.
    keys = np.atleast_2d(np.asarray(matches.keys, np.int64))
    counts: Any = getattr(matches, "counts", [keys.shape[1]])
    queries, columns = np.nonzero(np.arange(keys.shape[1]) < np.reshape(counts, (-1, 1)))
    return queries, keys[queries, columns]


def _metric(space: Space, dim: int, *, rounded: bool, penalty: float = 0.0) -> Any:
    if space.ball() is None:
        return usearch_index.MetricKind.L2sq
    kind, signature = usearch_index.MetricKind.Unknown, usearch_index.MetricSignature.ArrayArray
    # usearch keeps only the address; the cache of `_compile_separation` keeps the function.
    return usearch_index.CompiledMetric(
        _compile_separation(dim, rounded, penalty).address, kind, signature
    )


def _create_index(space: Space, dim: int, *, rounded: bool) -> Any:
    links, candidates = _DENSE if dim >= _LONG_DIM else _SPARSE
    return usearch_index.Index(
        ndim=dim + (space.ball() is not None),  # See `_graph_vectors`.
        metric=_metric(space, dim, rounded=rounded),
        dtype="bf16" if rounded else "f32",
        connectivity=links,
        expansion_add=candidates,
    )


@functools.cache
def _compile_separation(dim: int, rounded: bool, penalty: float) -> Any:
    """Compiles the separation of two of the graph's vectors, penalised for links.

    By separation, a few inner points are nearest to nearly all points near the boundary. Links to
    the nearest would lead to these hubs only, which keep too few links back. So separations are
    multiplied by the ratio of the larger to the smaller gap, to the power `penalty`.
    """

    @numba.njit(inline="always")
    def to_float32(value: Any) -> Any:
        return np.uint32(value << 16).view(np.float32) if rounded else value

    vector = numba.types.CPointer(numba.types.uint16 if rounded else numba.types.float32)

    @numba.cfunc(numba.types.float32(vector, vector), fastmath={"reassoc", "contract", "nsz"})
    def separation(x: Any, y: Any) -> Any:
        total = numba.types.float32(0)
        for i in range(dim):
            difference = to_float32(x[i]) - to_float32(y[i])
            total += difference * difference
        x_factor, y_factor = to_float32(x[dim]), to_float32(y[dim])
        total *= x_factor * y_factor
        if penalty:
            total *= (max(x_factor, y_factor) / min(x_factor, y_factor)) ** penalty
        return numba.types.float32(total)

    return separation
