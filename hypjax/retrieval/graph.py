"""Approximate search in a space's own distance: an HNSW graph of usearch with a compiled metric.

Graphs and lists for inner products assume vectors of similar length, which those of hyperbolic
points are not. So the graph compares points by the separation ‖x − y‖² / ((1 − c‖x‖²)(1 − c‖y‖²)),
of which the distance 2/√c·asinh(√(c·separation)) is an increasing function. A vector of the graph
holds the coordinates of a point and, last, 1 / (1 − c‖x‖²).
"""

import functools
import json
import pathlib
import sys
from collections.abc import Sequence
from typing import Any, Self

import jax
import numpy as np
from jaxtyping import Float32, Float64, Int

from hypjax.errors import UserError
from hypjax.geometry import PoincareBall, Space, Sphere
from hypjax.retrieval.embeddings import Embeddings, describe_space, replacing_file, space_of
from hypjax.retrieval.neighbors import search
from hypjax.system import console

SUFFIX = ".usearch"
_BUILDS = ((32, 256), (64, 512))  # Links of a point, and candidates when it is added.
_CANDIDATES = (32, 64, 128, 256, 512, 1024)  # Candidates of a search, of which the least is taken.
_WANTED, _NEAREST, _SAMPLE = 0.98, 10, 500  # Recall of so many neighbours of so many points.


class GraphGallery:
    """A gallery in a graph, with the paths and classes of its images.

    Two files hold it: the graph, such as gallery.usearch, and beside it gallery.usearch.parquet, a
    table with the `key`, `id` and `label` of each image.

    Attributes:
        ids: Paths of the images, [n] strings.
        labels: Names of their classes, [n] strings; empty if unknown.
        space: Space of the points, a ball or the sphere.
        fingerprint: Fingerprint of the model.
        recall: Share of the 10 nearest neighbours that the graph found, of a sample, when it was
            built.
    """

    def __init__(
        self, index: Any, keys: Int[np.ndarray, " n"], table: dict[str, Any], writable: bool = True
    ) -> None:
        """Keeps a graph with its table; see `build` and `open`."""
        self._index, self._keys, self._writable = index, keys, writable
        self.ids: np.ndarray = table["ids"]
        self.labels: np.ndarray = table["labels"]
        self.space: Space = table["space"]
        self.fingerprint: str = table["fingerprint"]
        self.recall: float = table["recall"]
        index.expansion_search = table["candidates"]

    def __len__(self) -> int:
        """Number of images."""
        return len(self.ids)

    @property
    def candidates(self) -> int:
        """Number of candidates of a search: more find more neighbours, and take longer."""
        return self._index.expansion_search

    @candidates.setter
    def candidates(self, number: int) -> None:
        self._index.expansion_search = number

    @classmethod
    def build(cls, embeddings: Embeddings) -> Self:
        """Builds a graph, and measures how many of the nearest neighbours it finds.

        The candidates of a search, and then the links of the points, are increased until 98% of the
        10 nearest of a sample are found. If they never are, a warning says how many are.

        Args:
            embeddings: Points of a ball or of the sphere.

        Raises:
            UserError: usearch or numba is not installed, or the space is another one.
        """
        table = {
            "ids": embeddings.ids,
            "labels": embeddings.labels,
            "space": embeddings.space,
            "fingerprint": embeddings.fingerprint,
            "recall": 0.0,
            "candidates": _CANDIDATES[0],
        }
        keys = np.arange(len(embeddings))
        for links, added in _BUILDS:
            index = _index(embeddings.space, embeddings.vectors.shape[1], links, added)
            gallery = cls(index, keys, table)
            gallery._insert(keys, embeddings.vectors)
            if gallery._tune(embeddings.vectors):
                return gallery
        console.warn(
            f"the graph finds {gallery.recall:.1%} of the {_NEAREST} nearest neighbours; a search "
            "of the .npz file finds all"
        )
        return gallery

    @classmethod
    def open(cls, path: pathlib.Path, *, writable: bool = False) -> Self:
        """Opens a gallery.

        Args:
            path: The graph's file.
            writable: Whether to read the graph into memory, so that it can change. Otherwise its
                file is memory-mapped.

        Raises:
            UserError: A file is missing or damaged, or usearch or numba is not installed.
        """
        keys, size, table = _read_table(path)
        if not path.exists() or path.stat().st_size != size:
            raise UserError(f"{path} is not the graph that its table describes; export it again")
        index = _index(table["space"], table.pop("dim"))
        metric = index.metric
        (index.load if writable else index.view)(str(path))
        index.metric = metric  # The file holds none.
        return cls(index, keys, table, writable)

    def save(self, path: pathlib.Path) -> None:
        """Writes both files.

        Raises:
            UserError: A file cannot be written.
        """
        import pyarrow
        import pyarrow.parquet

        with replacing_file(path) as temporary:
            self._index.save(str(temporary))
        facts = {
            "space": describe_space(self.space),
            "fingerprint": self.fingerprint,
            "recall": self.recall,
            "candidates": self.candidates,
            "dim": self._index.ndim - isinstance(self.space, PoincareBall),
            "bytes": path.stat().st_size,
        }
        columns = {"key": self._keys, "id": self.ids.tolist(), "label": self.labels.tolist()}
        table = pyarrow.table(columns).replace_schema_metadata({"hypjax": json.dumps(facts)})
        with replacing_file(_table_path(path)) as temporary:
            pyarrow.parquet.write_table(table, temporary)

    def add(self, embeddings: Embeddings) -> None:
        """Adds images.

        Raises:
            UserError: They were embedded by another model, one is in the gallery already, or the
                gallery was not opened as writable.
        """
        self._require_writable()
        if embeddings.fingerprint != self.fingerprint:
            raise UserError("the images were embedded by another model; embed them with this one")
        known = np.isin(embeddings.ids, self.ids)
        if known.any():
            raise UserError(f"{embeddings.ids[known][0]} is in the gallery; remove it first")
        first = self._keys[-1] + 1 if len(self) else 0
        keys = np.arange(first, first + len(embeddings))
        self._insert(keys, embeddings.vectors)
        self._keys = np.concatenate([self._keys, keys])
        self.ids = np.concatenate([self.ids, embeddings.ids])
        self.labels = np.concatenate([self.labels, embeddings.labels])

    def remove(self, ids: Sequence[str]) -> None:
        """Removes images.

        Raises:
            UserError: One is not in the gallery, or the gallery was not opened as writable.
        """
        self._require_writable()
        missing = np.setdiff1d(ids, self.ids)
        if len(missing):
            raise UserError(f"{missing[0]} is not in the gallery")
        removed = np.isin(self.ids, ids)
        self._index.remove(self._keys[removed])
        kept = ~removed
        self._keys, self.ids, self.labels = self._keys[kept], self.ids[kept], self.labels[kept]

    def nearest(
        self,
        points: Float32[np.ndarray, "n d"],
        k: int,
        own: Int[np.ndarray, " n"] | None = None,
    ) -> tuple[Float32[np.ndarray, "n k"], Int[np.ndarray, "n k"]]:
        """Finds the nearest items that the graph reaches.

        Args:
            points: The queries.
            k: Number of neighbours.
            own: For each query the index of the item that it is itself, which is not found; −1 for
                none.

        Returns:
            Distances, and indices of the items, nearest first.

        Raises:
            UserError: k is larger than the number of items to find, or the graph reaches fewer.
        """
        if not 1 <= k <= len(self) - (own is not None):
            raise UserError(f"k is {k}, but there are {len(self)} items in the gallery")
        separations, places = self._search(points, k, own)
        if not np.isfinite(separations).all():
            raise UserError("the graph reaches too few items; lower k, or export the gallery again")
        with jax.enable_x64(True):
            distances = np.asarray(self.space.distance_at(separations))
        return distances.astype(np.float32), places

    def _search(
        self, points: Float32[np.ndarray, "n d"], k: int, own: Int[np.ndarray, " n"] | None
    ) -> tuple[Float64[np.ndarray, "n k"], Int[np.ndarray, "n k"]]:
        """As `nearest`, but separations, which are infinite where the graph reaches no item."""
        found = self._index.search(_vectors(points, self.space), k + (own is not None))
        keys = np.asarray(found.keys, np.int64).reshape(len(points), -1)
        missing = np.arange(keys.shape[1]) >= np.reshape(found.counts, (-1, 1))
        with np.errstate(invalid="ignore"):  # Those of missing items hold anything.
            separations = np.array(found.distances, np.float64).reshape(keys.shape)
        separations[missing] = np.inf
        places = np.where(missing, -1, np.searchsorted(self._keys, keys))
        if own is not None:
            separations[places == own[:, None]] = np.inf
        order = np.argsort(separations, axis=1, kind="stable")[:, :k]
        return tuple(np.take_along_axis(values, order, axis=1) for values in (separations, places))

    def _insert(self, keys: Int[np.ndarray, " n"], points: Float32[np.ndarray, "n d"]) -> None:
        # From the centre outwards: a point keeps links to those nearest to it, and points near the
        # centre are near to all. If they came last, they would displace the links among the others.
        order = np.argsort(np.linalg.norm(points, axis=1), kind="stable")
        shown = "points added" if sys.stderr.isatty() else False
        self._index.add(keys[order], _vectors(points[order], self.space), log=shown)

    def _tune(self, points: Float32[np.ndarray, "n d"]) -> bool:
        """Chooses the candidates of searches by a sample; returns whether they find enough."""
        sample = np.random.default_rng(0).permutation(len(points))[:_SAMPLE]
        k = min(_NEAREST, len(points) - 1)
        if not k:
            return True
        _, exact = search(points[sample], sample, points, k=k, space=self.space)
        for self.candidates in _CANDIDATES:
            _, found = self._search(points[sample], k, sample)
            shared = (exact[:, :, None] == found[:, None]).any(axis=2)
            self.recall = float(shared.mean())
            if self.recall >= _WANTED:
                return True
        return False

    def _require_writable(self) -> None:
        if not self._writable:
            raise UserError("the gallery is memory-mapped; open it with writable=True to change it")


def export_usearch(embeddings: Embeddings, path: pathlib.Path) -> str:
    """Builds the graph of a gallery and writes it; see `GraphGallery`.

    Returns:
        Where the gallery is, and how many neighbours it finds.
    """
    gallery = GraphGallery.build(embeddings)
    gallery.save(path)
    return f"{path}; it finds {gallery.recall:.1%} of the {_NEAREST} nearest neighbours"


def _table_path(path: pathlib.Path) -> pathlib.Path:
    return path.with_name(f"{path.name}.parquet")


def _read_table(path: pathlib.Path) -> tuple[Int[np.ndarray, " n"], int, dict[str, Any]]:
    """Reads the table of a graph: keys, size of the graph's file in bytes, and the rest."""
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(_table_path(path))
        facts = json.loads(table.schema.metadata[b"hypjax"])
        facts["space"] = space_of(facts["space"])
        size = facts.pop("bytes")
        for name in ("id", "label"):
            facts[f"{name}s"] = np.array(table[name].to_pylist(), dtype=str)
        return table["key"].to_numpy(), size, facts
    except FileNotFoundError as error:
        raise UserError(f"{path} needs its table, {_table_path(path)}") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"the table beside {path} is damaged; export the gallery again") from error


def _index(space: Space, dim: int, links: int | None = None, added: int | None = None) -> Any:
    """An empty graph for points of a space."""
    try:
        import usearch.index
    except ImportError as error:
        raise UserError('a .usearch gallery needs usearch: pip install "hypjax[ann]"') from error
    if isinstance(space, Sphere):
        metric, size = usearch.index.MetricKind.L2sq, dim
    elif isinstance(space, PoincareBall):
        metric, size = _separation(dim)[0], dim + 1
    else:
        raise UserError(f"there is no graph for {space}; search the .npz file")
    return usearch.index.Index(
        ndim=size, metric=metric, dtype="f32", connectivity=links, expansion_add=added
    )


@functools.cache
def _separation(dim: int) -> tuple[Any, Any]:
    """The separation of two vectors of the graph as a metric of usearch, and its function.

    usearch keeps the address of the function alone, so that the cache has to keep the function.
    """
    try:
        import numba
    except ImportError as error:
        raise UserError('a .usearch gallery needs numba: pip install "hypjax[ann]"') from error
    from usearch.index import CompiledMetric, MetricKind, MetricSignature

    vector = numba.types.CPointer(numba.types.float32)

    @numba.cfunc(numba.types.float32(vector, vector), fastmath={"reassoc", "contract", "nsz"})
    def separation(x: Any, y: Any) -> Any:
        total = numba.types.float32(0)
        for i in range(dim):
            difference = x[i] - y[i]
            total += difference * difference
        return total * x[dim] * y[dim]

    metric = CompiledMetric(separation.address, MetricKind.Unknown, MetricSignature.ArrayArray)
    return metric, separation


def _vectors(points: Float32[np.ndarray, "n d"], space: Space) -> Float32[np.ndarray, "n e"]:
    """Points as vectors of the graph."""
    if not isinstance(space, PoincareBall):
        return points
    points = np.asarray(points, np.float64)
    factors = 1 / (1 - float(space.c) * np.sum(points**2, axis=1, keepdims=True))
    return np.concatenate([points, factors], axis=1).astype(np.float32)
