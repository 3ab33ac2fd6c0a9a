"""Approximate search in a space's own distance: galleries in an HNSW graph of usearch.

The graph returns candidates. In a ball, the points near its centre may be scanned, too: they are
near to all points. The candidates are ranked by the exact distances of the points themselves.
"""

import functools
import os
import pathlib
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import jax
import numpy as np
from jaxtyping import Float32, Float64, Int

from hypjax.engines import graph_files, graph_index
from hypjax.engines.candidates import Centre, assured, found_neighbours, rank
from hypjax.engines.graph_files import Facts, Table
from hypjax.errors import UserError
from hypjax.geometry import PoincareBall, Space
from hypjax.retrieval.embeddings import Embeddings
from hypjax.retrieval.neighbors import search
from hypjax.system import console
from hypjax.system.files import read_together

SUFFIX = ".usearch"
_WANTED, _NEAREST, _SAMPLE = 0.98, 10, 1000  # Recall of so many neighbours of so many points.
# Settings of searches, of which the cheapest is taken: candidates, and scanned shares of a ball.
_CANDIDATES = (12, 16, 20, 24, 32, 40, 48, 56, 64, 72, 80, 88, 96, 112, 128, 160, 192, 224, 256)
_CANDIDATES += (320, 384, 448, 512, 768, 1024)
_SCANNED = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2)
# Cost of a scan, in distances that are computed in the graph: that of a point, and of the ranking.
_SCAN_COST, _RANK_COST = 0.07, 300
_SPARE = 4  # Candidates beyond k that are ranked, at least, if vectors are rounded.

_Ranked = tuple[Float64[np.ndarray, "n k"], Int[np.ndarray, "n k"]]  # Separations and items.


class _Setting(NamedTuple):
    """A setting of searches, with its recall, and its cost in distances that are computed."""

    candidates: int
    scanned: int
    recall: float
    cost: float


class GraphGallery:
    """A gallery in a graph, with the paths and classes of its images.

    Three files hold it: the graph, such as gallery.usearch, and beside it gallery.usearch.parquet,
    a table with the `key`, `id` and `label` of each image, and gallery.usearch.npy, their points.

    Attributes:
        space: Space of the points, a ball or the sphere.
        fingerprint: Fingerprint of the model.
        candidates: Number of candidates of a search for 10 neighbours: more find more of them, and
            take longer. Searches for more neighbours take proportionally more candidates.
        recall: Share of the 10 nearest neighbours that searches found, of a sample, when it was
            built.
    """

    def __init__(self, index: Any, table: Table, facts: Facts, writable: bool = True) -> None:
        """Keeps a graph with its table; see `build` and `open`."""
        self._index, self._table, self._writable = index, table, writable
        self.space, self.fingerprint = facts.space, facts.fingerprint
        self.candidates, self.recall = facts.candidates, facts.recall
        self._rounded = facts.rounded

    def __len__(self) -> int:
        """Number of images."""
        return len(self._table.keys)

    @property
    def ids(self) -> np.ndarray:
        """Paths of the images, [n] strings."""
        return self._table.ids

    @property
    def labels(self) -> np.ndarray:
        """Names of their classes, [n] strings; empty if unknown."""
        return self._table.labels

    @classmethod
    def build(cls, embeddings: Embeddings) -> Self:
        """Builds a graph, and measures how many of the nearest neighbours searches find.

        The candidates of a search, and how many points near the centre are compared with every
        query, are chosen so that 98% of the 10 nearest of a sample are found at the least cost. If
        no setting finds as many, a warning says how many are found.

        Args:
            embeddings: Points of a ball or of the sphere.

        Raises:
            UserError: usearch or numba is not installed, or the space is another one.
        """
        points, space = embeddings.vectors, embeddings.space
        graph_index.create(space, points.shape[1], rounded=False)  # Checks the space.
        sample, exact = _sample(points, space)
        rounded = graph_index.can_round(points[sample], points[exact[1][:, -1]])
        index = graph_index.create(space, points.shape[1], rounded=rounded)
        keys, scanned = np.arange(len(points)), np.zeros(len(points), bool)
        table = Table(keys, embeddings.ids, embeddings.labels, scanned, points)
        facts = Facts(space, embeddings.fingerprint, rounded, _CANDIDATES[0], recall=1.0)
        gallery = cls(index, table, facts)
        gallery._insert(keys, points)
        gallery._tune(sample, exact)
        if gallery.recall < _WANTED:
            console.warn(
                f"searches of the graph find {gallery.recall:.1%} of the {_NEAREST} nearest "
                "neighbours; a search of the .npz file finds all"
            )
        return gallery

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, writable: bool = False) -> Self:
        """Opens a gallery.

        Args:
            path: The graph's file.
            writable: Whether to read the graph into memory, so that it can change. Otherwise its
                file is memory-mapped.

        Raises:
            UserError: A file is missing or damaged, or usearch or numba is not installed.
        """
        path = pathlib.Path(path)

        def read() -> Self:
            table, facts = graph_files.read(path)
            index = graph_index.create(facts.space, table.points.shape[1], rounded=facts.rounded)
            graph_index.read(index, path, writable=writable)
            return cls(index, table, facts, writable)

        return read_together(path, graph_files.files(path), read)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the files.

        Raises:
            UserError: A file cannot be written.
        """
        facts = Facts(self.space, self.fingerprint, self._rounded, self.candidates, self.recall)
        graph_files.write(pathlib.Path(path), self._index.save, self._table, facts)

    def add(self, embeddings: Embeddings) -> None:
        """Adds images.

        Raises:
            UserError: They were embedded by another model, one is not a point of the space or is in
                the gallery already, or the gallery was not opened as writable.
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
        added = Table(keys, embeddings.ids, embeddings.labels, scanned, points)
        self._replace(Table(*map(np.concatenate, zip(table, added, strict=True))))

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
        self._index.remove(self._table.keys[removed])
        self._replace(Table(*(column[~removed] for column in self._table)))

    def nearest(
        self,
        points: Float32[np.ndarray, "n d"],
        k: int,
        own: Int[np.ndarray, " n"] | None = None,
    ) -> tuple[Float32[np.ndarray, "n k"], Int[np.ndarray, "n k"]]:
        """Finds the nearest items among the candidates that the graph returns.

        Args:
            points: The queries.
            k: Number of neighbours.
            own: For each query the index of the item that it is itself, which is not found; −1 for
                none.

        Returns:
            Distances, and indices of the items, nearest first.

        Raises:
            UserError: A query is not a point of the space, k is larger than the number of items to
                find, or the graph reaches fewer.
        """
        self.space.check(points)
        if not 1 <= k <= len(self) - (own is not None):
            raise UserError(f"k is {k}, but there are {len(self)} items in the gallery")
        separations, items = self._nearest(points, k, own)
        if not np.isfinite(separations).all():
            raise UserError("the graph reaches too few items; lower k, or export the gallery again")
        with jax.enable_x64(True):
            distances = np.asarray(self.space.distance_at(separations))
        return distances.astype(np.float32), items

    def _nearest(
        self, points: Float32[np.ndarray, "n d"], k: int, own: Int[np.ndarray, " n"] | None
    ) -> tuple[Float64[np.ndarray, "n k"], Int[np.ndarray, "n k"]]:
        """As `nearest`, but separations: infinite, with index −1, where the graph reaches none."""
        separations, items, _ = self._search(points, k, own)
        if not self._table.scanned.any():
            return separations, items
        rows, near = self._centre.within(points, separations[:, -1])
        if own is not None:
            kept = near != own[rows]
            rows, near = rows[kept], near[kept]
        return self._rank(points, items, k, rows, near)

    def _search(
        self, points: Float32[np.ndarray, "n d"], k: int, own: Int[np.ndarray, " n"] | None
    ) -> tuple[Float64[np.ndarray, "n k"], Int[np.ndarray, "n k"], int]:
        """Searches the graph.

        Returns:
            Separations, and indices of the items, nearest first, infinite and −1 where the graph
            reaches none; and the number of distances that were computed.
        """
        wanted = k + (own is not None)
        spare = max(_SPARE, wanted // 3) if self._rounded else 0
        listed = min(wanted + spare, len(self))
        self._index.expansion_search = max(self.candidates * k // _NEAREST, self.candidates, listed)
        found = self._index.search(graph_index.vectors(points, self.space), listed)
        # For one query, usearch returns arrays of one axis, without those that are missing.
        shape = len(points), -1 if len(points) else listed
        keys = np.asarray(found.keys, np.int64).reshape(shape)
        items = np.searchsorted(self._table.keys, keys)
        counts = np.reshape(getattr(found, "counts", keys.shape[1]), (-1, 1))
        missing = np.arange(keys.shape[1]) >= counts
        if own is not None:
            missing |= items == own[:, None]
        items[missing] = -1
        if self._rounded:
            return *self._rank(points, items, k), found.computed_distances
        with np.errstate(invalid="ignore"):  # Those of missing items hold anything.
            separations = np.array(found.distances, np.float64).reshape(shape)
        separations[missing] = np.inf
        order = np.argsort(separations, axis=1, kind="stable")[:, :k]
        nearest = (np.take_along_axis(values, order, axis=1) for values in (separations, items))
        return *nearest, found.computed_distances

    def _rank(
        self,
        points: Float32[np.ndarray, "n d"],
        items: Int[np.ndarray, "n m"],
        k: int,
        *more: Int[np.ndarray, " p"],
    ) -> tuple[Float64[np.ndarray, "n k"], Int[np.ndarray, "n k"]]:
        """Ranks items, and more of them as pairs of row and item, by their exact distances."""
        rows, places = np.nonzero(items >= 0)
        pairs = rows, items[rows, places]
        if more:
            pairs = (np.concatenate(both) for both in zip(pairs, more, strict=True))
        return rank(points, self._table.points, *pairs, k=k, space=self.space)

    @functools.cached_property
    def _centre(self) -> Centre:
        return Centre(self._table.points, np.flatnonzero(self._table.scanned), self.space)

    def _replace(self, table: Table) -> None:
        self._table = table
        self.__dict__.pop("_centre", None)

    def _insert(self, keys: Int[np.ndarray, " n"], points: Float32[np.ndarray, "n d"]) -> None:
        # From the centre outwards: a point keeps links to those nearest to it, and points near the
        # centre are near to all. If they came last, they would displace the links among the others.
        order = np.argsort(np.linalg.norm(points, axis=1), kind="stable")
        shown = "points added" if sys.stderr.isatty() else False
        self._index.add(keys[order], graph_index.vectors(points[order], self.space), log=shown)

    def _tune(self, sample: Int[np.ndarray, " s"], exact: _Ranked) -> None:
        """Chooses a setting of searches by the exact neighbours of a sample."""
        settings: list[_Setting] = []
        points, k = self._table.points[sample], exact[1].shape[1]
        own = exact[1] == sample[:, None]
        order = np.argsort(np.linalg.norm(self._table.points, axis=1), kind="stable")
        places = np.argsort(order)[exact[1]]  # Of the neighbours, in the order from the centre.
        shares = _SCANNED if isinstance(self.space, PoincareBall) else _SCANNED[:1]
        for candidates in _CANDIDATES:
            self.candidates = candidates
            *found, computed = self._search(points, k, None)
            cost = computed / len(sample)
            hits = found_neighbours(exact, found)
            for scanned in {int(share * len(self)) for share in shares}:
                recall = assured(hits | (places < scanned), own)
                scan_cost = _SCAN_COST * scanned + _RANK_COST if scanned else 0
                settings.append(_Setting(candidates, scanned, recall, cost + scan_cost))
            enough = [setting for setting in settings if setting.recall >= _WANTED]
            best = min(enough, key=lambda setting: setting.cost, default=None)
            if candidates >= len(self) or (best and best.cost <= cost):
                break
        best = best or max(settings, key=lambda setting: setting.recall)
        self.candidates = best.candidates
        self._table.scanned[order[: best.scanned]] = True
        found = self._nearest(points, k, None)
        self.recall = assured(found_neighbours(exact, found), own)

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


def _sample(
    points: Float32[np.ndarray, "n d"], space: Space
) -> tuple[Int[np.ndarray, " s"], _Ranked]:
    """Some points, and their nearest neighbours by an exact search, themselves included."""
    sample = np.random.default_rng(0).permutation(len(points))[:_SAMPLE]
    k = min(_NEAREST + 1, len(points))
    items = search(points[sample], None, points, k=k, space=space)[1]
    rows = np.repeat(np.arange(len(sample)), k)
    return sample, rank(points[sample], points, rows, items.ravel(), k=k, space=space)
