"""Recall and speed of approximate searches, compared with the exact one and with cosine."""

import itertools
import pathlib
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float32, Int
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from hypjax.benchmarks import peers
from hypjax.errors import UserError
from hypjax.geometry import PoincareBall, Space, Sphere
from hypjax.retrieval import euclidean, nearest_neighbors, qdrant_engines
from hypjax.retrieval.embeddings import Embeddings
from hypjax.retrieval.graph import GraphGallery
from hypjax.retrieval.qdrant import QdrantGallery

_K, _QUERIES, _REPEATS = 10, 1000, 3
_CANDIDATES = (16, 32, 64, 128, 256, 512)  # Of a search in a graph.
_LINKS, _ADDED = 32, 256  # Links of a point in a graph, and candidates when it is added.
_LISTS = (1, 4, 16, 64)  # Inverted lists that a search visits.
_SHOWN = ("exact", "16 of", "64 cand", "256 cand")  # Settings of the table; the figure shows all.
_WANTED = 0.98
_SETTINGS = ((PoincareBall(0.1, 2.3), 128), (PoincareBall(1.0, None), 128))
_SETTINGS += ((PoincareBall(0.1, 2.3), 8), (PoincareBall(1.0, None), 8))

# From vectors of queries to indices of neighbours.
Search = Callable[[Float32[np.ndarray, "n k"]], Int[np.ndarray, "n k"]]


def rows(quick: bool) -> Iterator[dict[str, Any]]:
    """Yields one row per ball, number of coordinates, engine and setting.

    Each has the share of the 10 nearest neighbours that were found, queries per second and the
    seconds of building the index. Cosine is measured on the same features, against its own exact
    neighbours. If quick, there is one ball, and each search is timed once.

    Raises:
        UserError: usearch or numba is not installed.
    """
    if not peers.installed("usearch", "numba"):
        raise UserError('ann requires usearch and numba: pip install "hypjax[ann]"')
    count, repeats = (5000, 1) if quick else (100_000, _REPEATS)
    for ball, dim in _SETTINGS[-1:] if quick else _SETTINGS:
        features = _features(count, dim)
        points = np.asarray(ball.embed(features))
        unit = np.asarray(Sphere().embed(features))
        facts = {"c": float(ball.c), "dim": dim, "points": count}
        for space, x in ((ball, points), (Sphere(), unit)):
            name = "cosine" if isinstance(space, Sphere) else "hyperbolic"
            true, seconds = _timed(lambda x=x, space=space: _exact(x, space), repeats)
            row = {**facts, "distance": name, "engine": "hypjax", "setting": "exact"}
            yield row | {"recall": 1.0, "rate": _QUERIES / seconds, "build": 0.0}
            engines = _cosine(x) if name == "cosine" else _hyperbolic(x, space)
            for engine, setting, built, search, queries in engines:
                found, seconds = _timed(lambda s=search, q=queries: s(q), repeats)
                row = {**facts, "distance": name, "engine": engine, "setting": setting}
                measured = {"recall": _recall(found, true), "rate": _QUERIES / seconds}
                yield row | measured | {"build": built}


def _features(count: int, dim: int) -> Float32[np.ndarray, "n d"]:
    """Clusters of 20, with norms from 0.66 to 3.3: up to √c‖x‖ = 0.62 and 0.997 in the balls."""
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(count // 20, dim))
    features = centres[rng.integers(0, len(centres), count)] + 0.7 * rng.normal(size=(count, dim))
    norms = 3.3 * rng.uniform(0.2, 1, size=(count, 1))
    return (features * norms / np.linalg.norm(features, axis=1, keepdims=True)).astype(np.float32)


def _exact(x: Float32[np.ndarray, "n d"], space: Space) -> Int[np.ndarray, "q k"]:
    return nearest_neighbors(x[:_QUERIES], x, k=_K, space=space)[1]


def _hyperbolic(
    x: Float32[np.ndarray, "n d"], ball: PoincareBall
) -> Iterator[tuple[str, str, float, Search, np.ndarray]]:
    """Engines with their settings, seconds of building, searches and queries."""
    gallery, built = _timed(lambda: GraphGallery.build(_embeddings(x, ball)), repeats=1)
    for gallery.candidates in _CANDIDATES:
        setting = f"{gallery.candidates} candidates"
        search = lambda q: gallery.nearest(q, _K)[1]  # noqa: E731
        yield "usearch, own distance (--export=usearch)", setting, built, search, x[:_QUERIES]
    vectors, queries = (
        np.ascontiguousarray(ball.search_vectors(part, role), np.float32)
        for part, role in ((x, "gallery"), (x[:_QUERIES], "query"))
    )
    yield from _usearch("usearch, inner product of d + 1", vectors, queries, "ip")
    yield from _usearch("usearch, L2 of the ball's points", x, x[:_QUERIES], "l2sq")
    if peers.installed("faiss"):
        yield from _lists("faiss IVF, inner product of d + 1", vectors, queries)
        yield from _twice(x, ball)
    if peers.installed("qdrant_edge"):
        yield from _qdrant(x, ball)


def _cosine(
    x: Float32[np.ndarray, "n d"],
) -> Iterator[tuple[str, str, float, Search, np.ndarray]]:
    yield from _usearch("usearch, cosine", x, x[:_QUERIES], "cos")
    if peers.installed("faiss"):
        import faiss

        index, built = _faiss_graph(x, faiss.METRIC_INNER_PRODUCT)
        for index.hnsw.efSearch in _CANDIDATES:
            setting = f"{index.hnsw.efSearch} candidates"
            yield (
                "faiss HNSW, cosine",
                setting,
                built,
                lambda q: index.search(q, _K)[1],
                x[:_QUERIES],
            )


def _twice(
    x: Float32[np.ndarray, "n d"], ball: PoincareBall
) -> Iterator[tuple[str, str, float, Search, np.ndarray]]:
    """A graph of Euclidean distances, searched twice."""
    import faiss

    index, built = _faiss_graph(x, faiss.METRIC_L2)
    for index.hnsw.efSearch in _CANDIDATES[2:]:
        candidates = index.hnsw.efSearch

        def search(q: np.ndarray, m: int = candidates) -> np.ndarray:
            near = lambda points, count: index.search(points, count)[1]  # noqa: E731
            return euclidean.nearest(near, x, q, k=_K, space=ball, candidates=m)[1]

        engine = "faiss HNSW, L2, two searches (--export=faiss:hnsw)"
        yield engine, f"{candidates} candidates", built, search, x[:_QUERIES]


def _qdrant(
    x: Float32[np.ndarray, "n d"], ball: PoincareBall
) -> Iterator[tuple[str, str, float, Search, np.ndarray]]:
    """The engine of Qdrant, embedded."""
    with tempfile.TemporaryDirectory() as folder:
        engine = qdrant_engines.Folder(pathlib.Path(folder) / "gallery.qdrant")
        embeddings = _embeddings(x, ball)
        gallery = QdrantGallery.create(engine, embeddings)
        _, built = _timed(lambda: gallery.add(embeddings), repeats=1)
        for gallery.candidates in _CANDIDATES[2:]:
            search = lambda q: np.array(  # noqa: E731
                [[int(name) for name in hits.ids] for hits in gallery.nearest(q, _K)]
            )
            setting = f"{gallery.candidates} candidates"
            yield "Qdrant, embedded (--export=qdrant)", setting, built, search, x[:_QUERIES]


def _faiss_graph(x: Float32[np.ndarray, "n d"], metric: int) -> tuple[Any, float]:
    """A graph, and seconds of building it."""
    import faiss

    index = faiss.IndexHNSWFlat(x.shape[1], _LINKS, metric)
    index.hnsw.efConstruction = _ADDED
    return index, _timed(lambda: index.add(x), repeats=1)[1]


def _usearch(
    engine: str, vectors: np.ndarray, queries: np.ndarray, metric: str
) -> Iterator[tuple[str, str, float, Search, np.ndarray]]:
    from usearch.index import Index

    index = Index(
        ndim=vectors.shape[1],
        metric=metric,
        dtype="f32",
        connectivity=_LINKS,
        expansion_add=_ADDED,
    )
    _, built = _timed(lambda: index.add(np.arange(len(vectors)), vectors), repeats=1)
    for index.expansion_search in _CANDIDATES:
        setting = f"{index.expansion_search} candidates"
        search = lambda q: np.asarray(index.search(q, _K).keys, np.int64)  # noqa: E731
        yield engine, setting, built, search, queries


def _lists(
    engine: str, vectors: np.ndarray, queries: np.ndarray
) -> Iterator[tuple[str, str, float, Search, np.ndarray]]:
    import faiss

    lists = int(4 * len(vectors) ** 0.5)
    flat = faiss.IndexFlatIP(vectors.shape[1])
    index = faiss.IndexIVFFlat(flat, vectors.shape[1], lists, faiss.METRIC_INNER_PRODUCT)

    def build() -> None:
        index.train(vectors)
        index.add(vectors)

    _, built = _timed(build, repeats=1)
    for index.nprobe in _LISTS:
        setting = f"{index.nprobe} of {lists} lists"
        yield engine, setting, built, lambda q: index.search(q, _K)[1], queries


def _embeddings(x: Float32[np.ndarray, "n d"], space: Space) -> Embeddings:
    ids = np.arange(len(x)).astype(str)
    return Embeddings(x, ids, np.full(len(x), ""), space, "benchmark", "benchmark", {})


def _timed(run: Callable[[], Any], repeats: int = _REPEATS) -> tuple[Any, float]:
    """The result of a function and its seconds: of several calls after the first, the median."""
    found, seconds = None, []
    for _ in range(repeats + (repeats > 1)):
        started = time.perf_counter()
        found = run()
        seconds.append(time.perf_counter() - started)
    return found, float(np.median(seconds[1:] or seconds))


def _recall(found: Int[np.ndarray, "n k"], true: Int[np.ndarray, "n k"]) -> float:
    return float((true[:, :, None] == found[:, None]).any(axis=2).mean())


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Formats recall and speed of some settings in Markdown, a column for each ball.

    Below are our times over those of usearch's cosine, at a recall of at least 0.98.
    """
    columns = {(row["c"], row["dim"]): f"c {row['c']:g}, {row['dim']}" for row in rows}
    lines = [f"| distance | engine | setting | {' | '.join(columns.values())} |"]
    lines.append("|---" * (3 + len(columns)) + "|")
    names = ("distance", "engine", "setting")
    cells = {
        (*(row[name] for name in names), row["c"], row["dim"]): (
            f"{row['recall']:.3f} · {row['rate']:,.0f}"
        )
        for row in rows
    }
    for key in dict.fromkeys(tuple(row[name] for name in names) for row in rows):
        if key[2].startswith(_SHOWN):
            found = [cells.get((*key, *column), "") for column in columns]
            lines.append(f"| {' | '.join((*key, *found))} |")
    return "\n".join([*lines, "", *_ratios(rows)])


def draw(rows: Sequence[dict[str, Any]], path: pathlib.Path) -> None:
    """Draws recall against speed, one panel per ball and number of coordinates.

    Args:
        rows: What `rows` yields.
        path: Figure to write.
    """
    settings = list(dict.fromkeys((row["c"], row["dim"]) for row in rows))
    engines = list(dict.fromkeys(row["engine"] for row in rows))
    figure = Figure(figsize=(5 * len(settings), 4.8), layout="constrained")
    axes = figure.subplots(1, len(settings), squeeze=False)[0]
    for axis, (c, dim) in zip(axes, settings, strict=True):
        for engine, marker in zip(engines, itertools.cycle("osD^vP*")):
            own = [row for row in rows if (row["c"], row["dim"]) == (c, dim)]
            own = [row for row in own if row["engine"] == engine]
            recalls, rates = ([row[name] for row in own] for name in ("recall", "rate"))
            axis.plot(recalls, rates, marker=marker, label=engine)
        axis.set(xlabel="recall of the 10 nearest", ylabel="queries per second", yscale="log")
        axis.set_title(f"c = {c:g}, {dim} coordinates")
        axis.grid(alpha=0.3)
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3)
    FigureCanvasAgg(figure)
    figure.savefig(path, dpi=100)


def _ratios(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    for c, dim in dict.fromkeys((row["c"], row["dim"]) for row in rows):
        best = {}
        for name, start in (("ours", "usearch, own"), ("cosine", "usearch, cosine")):
            rates = [
                row["rate"]
                for row in rows
                if (row["c"], row["dim"]) == (c, dim)
                and row["engine"].startswith(start)
                and row["recall"] >= _WANTED
            ]
            best[name] = max(rates, default=None)
        text = f"c = {c:g}, {dim} coordinates, recall at least {_WANTED}: "
        if None in best.values():
            missing = [name for name, rate in best.items() if rate is None]
            yield f"{text}not reached by {' and '.join(missing)}"
        else:
            yield f"{text}{best['cosine'] / best['ours']:.2f} times the time of usearch's cosine"
