"""Recall and speed of approximate searches, compared with exact search and with cosine."""

import functools
import itertools
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Float32, Int
from matplotlib.figure import Figure

from benchmarks import measure, peers
from hypjax.errors import UserError
from hypjax.galleries.embeddings import Embeddings
from hypjax.geometry import PoincareBall, Space, Sphere, poincare
from hypjax.integrations.ann import IndexedGallery
from hypjax.retrieval import euclidean, nearest_neighbors
from hypjax.retrieval.box_tree import BoxTree
from hypjax.system import console

COLUMNS = {
    "data": "{data}",
    "c": "{c:g}",
    "coordinates": "{dim}",
    "distance": "{distance}",
    "engine": "{engine}",
    "setting": "{setting}",
    "recall": "{recall:.3f}",
    "queries/s": "{rate:,.0f}",
}
_K, _QUERIES = 10, 1000
_COUNT, _QUICK_COUNT = 100_000, 5000  # Points.
_CANDIDATES = (10, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512)  # In a search of a graph.
_LINKS, _ADDED = 32, 256  # Links of a point in a graph, and candidates when it is added.
_LISTS = (1, 4, 16, 64)  # Inverted lists that a search visits.
_OURS, _PEER = "own distance (--export=ann)", "usearch, cosine"
_WANTED = 0.98
_MIN_MISSED = 1e-4  # Smallest share in the figure: one in 10,000 neighbours.
_BALLS = PoincareBall(0.1, 2.3), PoincareBall(1.0, None)
_SETTINGS = [("clusters", ball, dim) for dim in (128, 8) for ball in _BALLS]
_SETTINGS += [("a tree", _BALLS[1], 32), ("a tree", _BALLS[1], 10)]
_STEP, _MOST_CHILDREN = 2.2, 400  # Distance of a tree's node from its parent; see `_tree`.

Points = Float32[np.ndarray, "n d"]
Items = Int[np.ndarray, "queries k"]


class _Engine(NamedTuple):
    """An engine with an index, and the settings to measure."""

    name: str
    search: Callable[[int], Items]  # From a setting's value to the neighbours of the queries.
    settings: Mapping[str, int]  # Values by name, such as numbers of candidates.


def rows(options: measure.Options) -> Iterator[dict]:
    """One row per data, ball, number of coordinates, engine and setting; if quick, for two data.

    A row holds the recall of the 10 nearest neighbours, and queries per second. Cosine is measured
    on the same features, against the exact neighbours by cosine.

    Raises:
        UserError: usearch or numba is not installed.
    """
    if not peers.installed("usearch", "numba"):
        raise UserError('ann requires usearch and numba: pip install "hypjax[ann]"')
    repeats = 1 if options.quick else options.repeats
    for data, ball, dim in _SETTINGS[-3::2] if options.quick else _SETTINGS:
        count = _QUICK_COUNT if options.quick else _COUNT
        clusters = _features(count, dim)
        nodes = _tree(count // 2, dim) if data == "a tree" else None
        untimed_rows, searches = [], []
        for space in (ball, Sphere()) if nodes is None else (ball,):
            points, exact_items = nodes, None
            if points is None:
                points = np.asarray(space.embed(clusters))
            distance = "hyperbolic" if space is ball else "cosine"
            for engine in _engines(points, space):
                for setting, value in engine.settings.items():
                    search = functools.partial(engine.search, value)
                    items = search()
                    if exact_items is None:  # The exact search comes first.
                        exact_items = items
                    hits = (exact_items[:, :, None] == items[:, None]).any(axis=2)
                    row = {"data": data, "c": float(ball.c), "dim": dim, "distance": distance}
                    row |= {"engine": engine.name, "setting": setting}
                    untimed_rows.append(row | {"recall": float(hits.mean())})
                    searches.append(search)
        times = measure.interleaved(searches, repeats)
        for row, seconds in zip(untimed_rows, times, strict=True):
            yield row | {"rate": _QUERIES / float(np.median(seconds))}


def _features(count: int, dim: int) -> Points:
    """Clusters of 20, with norms from 0.66 to 3.3: up to √c‖x‖ = 0.62 and 0.997 in the balls."""
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(count // 20, dim))
    features = centres[rng.integers(0, len(centres), count)] + 0.7 * rng.normal(size=(count, dim))
    norms = 3.3 * rng.uniform(0.2, 1, size=(count, 1))
    return (features * norms / np.linalg.norm(features, axis=1, keepdims=True)).astype(np.float32)


def _tree(count: int, dim: int) -> Points:
    """Nodes of a random tree, outwards from the origin to the boundary of the ball with c = 1.

    Each node has 2 to 400 children in heavy-tailed numbers, at about one distance from it.
    """
    rng = np.random.default_rng(0)
    points, made, add = (
        np.zeros((count, dim)),
        1,
        jax.jit(lambda x, y: poincare.mobius_add(x, y, 1.0)),
    )
    for parent in points:  # Which are filled in below.
        if made == count:
            break
        number = min(int(2 * rng.pareto(1.1)) + 2, _MOST_CHILDREN, count - made)
        outward = parent / max(np.linalg.norm(parent), 1e-9)
        directions = rng.normal(size=(_MOST_CHILDREN, dim))  # One shape, for one program.
        directions *= 0.6 / np.linalg.norm(directions, axis=1, keepdims=True)
        directions += outward
        directions /= np.linalg.norm(directions, axis=1, keepdims=True)
        steps = np.tanh(_STEP * rng.uniform(0.9, 1.1, size=(len(directions), 1)) / 2) * directions
        points[made : made + number] = add(parent, steps)[:number]
        made += number
    return points.astype(np.float32)


def _engines(x: Points, space: Space) -> Iterator[_Engine]:
    """The engines for a space, the exact search first; queries are the first points."""
    queries, faiss = x[:_QUERIES], peers.installed("faiss")

    def exact(_: int) -> Items:
        return nearest_neighbors(queries, x, k=_K, space=space)[1]

    yield _Engine("hypjax", exact, {"exact": 0})
    if isinstance(space, Sphere):
        yield _usearch_engine(_PEER, x, queries, "cos")
        yield _usearch_engine(f"{_PEER} in bfloat16", x, queries, "cos", dtype="bf16")
        if faiss:
            search_graph = _faiss_graph_search(x, "METRIC_INNER_PRODUCT")
            search = functools.partial(search_graph, queries, _K)
            yield _Engine("faiss HNSW, cosine", search, _candidates())
        return
    yield _exported_engine(x, space)
    gallery_vectors, query_vectors = peers.search_vectors(space, x)
    query_vectors = query_vectors[:_QUERIES]
    yield _usearch_engine("usearch, inner product of d + 1", gallery_vectors, query_vectors, "ip")
    yield _usearch_engine("usearch, L2 of the ball's points", x, queries, "l2sq")
    if faiss:
        name = "faiss IVF, inner product of d + 1"
        yield _faiss_lists_engine(name, gallery_vectors, query_vectors)
        search_graph = _faiss_graph_search(x, "METRIC_L2")

        def search_twice(candidates: int) -> Items:
            """Two searches in a graph of Euclidean distances."""
            search = functools.partial(search_graph, candidates=candidates)
            settings = dict(k=_K, space=space, candidates=candidates)
            return euclidean.nearest(search, x, queries, **settings)[1]

        name = "faiss HNSW, L2, two searches"
        yield _Engine(name, search_twice, _candidates(least=64))


def _candidates(least: int = 0) -> dict[str, int]:
    return {f"{number} candidates": number for number in _CANDIDATES if number >= least}


def _exported_engine(x: Points, ball: PoincareBall) -> _Engine:
    """The tree or the graph that --export=ann writes."""
    ids = np.arange(len(x)).astype(str)
    embeddings = Embeddings(x, ids, np.full(len(x), ""), ball, "benchmark", "benchmark", {})
    gallery = IndexedGallery.build(embeddings)

    def search(candidates: int) -> Items:
        gallery.candidates = candidates
        return gallery.search_rows(x[:_QUERIES], _K)[1]

    more = {} if isinstance(gallery.index, BoxTree) else _candidates()
    return _Engine(_OURS, search, {"as exported": gallery.candidates, **more})


def _faiss_graph_search(x: Points, metric: str) -> Callable[[Points, int, int], Items]:
    """Builds an HNSW graph; returns its search for k neighbours, with a number of candidates."""
    import faiss

    index = faiss.IndexHNSWFlat(x.shape[1], _LINKS, getattr(faiss, metric))
    index.hnsw.efConstruction = _ADDED
    index.add(x)

    def search(queries: Points, k: int, candidates: int) -> Items:
        index.hnsw.efSearch = candidates
        return index.search(queries, k)[1]

    return search


def _usearch_engine(
    name: str, vectors: Points, queries: Points, metric: str, dtype: str = "f32"
) -> _Engine:
    from usearch.index import Index

    settings = dict(metric=metric, dtype=dtype, connectivity=_LINKS, expansion_add=_ADDED)
    index = Index(ndim=vectors.shape[1], **settings)
    index.add(np.arange(len(vectors)), vectors)

    def search(candidates: int) -> Items:
        index.expansion_search = candidates
        return np.asarray(index.search(queries, _K).keys, np.int64)

    return _Engine(name, search, _candidates())


def _faiss_lists_engine(name: str, vectors: Points, queries: Points) -> _Engine:
    import faiss

    num_lists = int(4 * len(vectors) ** 0.5)
    flat = faiss.IndexFlatIP(vectors.shape[1])
    index = faiss.IndexIVFFlat(flat, vectors.shape[1], num_lists, faiss.METRIC_INNER_PRODUCT)
    index.train(vectors)
    index.add(vectors)

    def search(visited: int) -> Items:
        index.nprobe = visited
        return index.search(queries, _K)[1]

    settings = {f"{visited} of {num_lists} lists": visited for visited in _LISTS}
    return _Engine(name, search, settings)


def conclude(rows: measure.Rows, output: pathlib.Path) -> None:
    """Prints our time as a multiple of usearch's cosine at a recall of 0.98, and draws all rows.

    The figure shows speed against missed neighbours, one panel per ball and number of coordinates.
    """
    rows_of_ball = {(row["data"], row["c"], row["dim"]): [] for row in rows}
    for row in rows:
        rows_of_ball[row["data"], row["c"], row["dim"]].append(row)
    engines = list(dict.fromkeys(row["engine"] for row in rows))
    num_columns = min(len(rows_of_ball), 2)
    num_rows = -(-len(rows_of_ball) // num_columns)
    figure = Figure(figsize=(6 * num_columns, 4 * num_rows + 1), layout="constrained")
    axes = figure.subplots(num_rows, num_columns, squeeze=False).reshape(-1)
    for axis, ((data, c, dim), panel_rows) in zip(axes, rows_of_ball.items(), strict=False):
        title, best = f"{data}, c = {c:g}, {dim} coordinates", {}
        for engine, marker in zip(engines, itertools.cycle("osD^vP*X")):
            engine_rows = [row for row in panel_rows if row["engine"] == engine]
            points = sorted((row["rate"], row["recall"]) for row in engine_rows)
            missed = [max(1 - recall, _MIN_MISSED) for _, recall in points]
            axis.plot(missed, [rate for rate, _ in points], marker=marker, label=engine)
            best[engine] = max((rate for rate, recall in points if recall >= _WANTED), default=None)
        if best[_OURS] and best.get(_PEER):
            times = f"{best[_PEER] / best[_OURS]:.2f} times the time of usearch's cosine"
            print(f"{title}, recall at least {_WANTED}: {times}")
        axis.axvline(1 - _WANTED, color="grey", linestyle=":")
        axis.set(xlabel="share of the 10 nearest that is missed", ylabel="queries per second")
        axis.set(xscale="log", yscale="log", title=title)
        axis.invert_xaxis()
        axis.grid(alpha=0.3)
    figure.legend(*axis.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    path = output.with_suffix(".png")
    with console.tolerating(str(path)):
        figure.savefig(path, dpi=100)
        print(f"drew recall against speed to {path}")
