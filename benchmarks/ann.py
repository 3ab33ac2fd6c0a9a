"""Recall and speed of approximate searches, compared with the exact one and with cosine."""

import functools
import itertools
import operator
import pathlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
from jaxtyping import Float32, Int
from matplotlib.figure import Figure

from benchmarks import measure, peers
from hypjax.errors import UserError
from hypjax.geometry import PoincareBall, Space, Sphere
from hypjax.integrations.usearch import GraphGallery
from hypjax.retrieval import euclidean, nearest_neighbors
from hypjax.retrieval.embeddings import Embeddings

_K, _QUERIES = 10, 1000
_COUNT, _QUICK_COUNT = 100_000, 5000  # Points.
_SLOW = 2.0  # Searches that take more seconds are timed once.
_CANDIDATES = (10, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512)  # Of a search in a graph.
_LINKS, _ADDED = 32, 256  # Links of a point in a graph, and candidates when it is added.
_LISTS = (1, 4, 16, 64)  # Inverted lists that a search visits.
_SHOWN = ("exact", "as exported", "16 of", "64 cand", "256 cand")  # The figure shows all settings.
_OURS, _PEER = "usearch, own distance (--export=usearch)", "usearch, cosine"
_WANTED = 0.98
_LEAST_MISSED = 1e-4  # Smallest share in the figure: one in 10,000 neighbours.
_SETTINGS = ((PoincareBall(0.1, 2.3), 128), (PoincareBall(1.0, None), 128))
_SETTINGS += ((PoincareBall(0.1, 2.3), 8), (PoincareBall(1.0, None), 8))

Points = Float32[np.ndarray, "n d"]
Items = Int[np.ndarray, "queries k"]


class _Engine(NamedTuple):
    """An engine with an index, and with settings: the number of each, by name."""

    name: str
    built: float  # Seconds of building the index.
    search: Callable[[int], Items]  # From the number of a setting to neighbours of the queries.
    settings: Mapping[str, int]


def rows(options: measure.Options) -> measure.Rows:
    """One row per ball, number of coordinates, engine and setting; if quick, of one ball.

    Each has the share of the 10 nearest neighbours that were found, queries per second and the
    seconds of building the index. Cosine is measured on the same features, against its own exact
    neighbours. Times are medians. Raises UserError if usearch or numba is not installed.
    """
    if not peers.installed("usearch", "numba"):
        raise UserError('ann requires usearch and numba: pip install "hypjax[ann]"')
    count = options.points or (_QUICK_COUNT if options.quick else _COUNT)
    found = []
    for ball, dim in _SETTINGS[-1:] if options.quick else _SETTINGS:
        features = _features(count, dim)
        own, searches = [], []
        for space in (ball, Sphere()):
            x, true = np.asarray(space.embed(features)), None
            for engine in _engines(x, space, options.exported):
                for setting, number in engine.settings.items():
                    searches.append(functools.partial(engine.search, number))
                    items = searches[-1]()
                    true = items if true is None else true  # The exact search comes first.
                    recall = float((true[:, :, None] == items[:, None]).any(axis=2).mean())
                    own.append(
                        {"c": float(ball.c), "dim": dim, "points": count}
                        | {"distance": "hyperbolic" if space is ball else "cosine"}
                        | {"engine": engine.name, "setting": setting, "recall": recall}
                        | {"build": engine.built}
                    )
        times = measure.interleaved(searches, options.repeats, slow=_SLOW)
        for row, taken in zip(own, times, strict=True):
            found.append(row | {"rate": _QUERIES / float(np.median(taken))})
    return found


def _features(count: int, dim: int) -> Points:
    """Clusters of 20, with norms from 0.66 to 3.3: up to √c‖x‖ = 0.62 and 0.997 in the balls."""
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(count // 20, dim))
    features = centres[rng.integers(0, len(centres), count)] + 0.7 * rng.normal(size=(count, dim))
    norms = 3.3 * rng.uniform(0.2, 1, size=(count, 1))
    return (features * norms / np.linalg.norm(features, axis=1, keepdims=True)).astype(np.float32)


def _engines(x: Points, space: Space, exported: bool) -> Iterator[_Engine]:
    """The engines for a space, the exact search first; queries are the first points."""
    queries = x[:_QUERIES]

    def exact(_: int) -> Items:
        return nearest_neighbors(queries, x, k=_K, space=space)[1]

    yield _Engine("hypjax", 0.0, exact, {"exact": 0})
    if not isinstance(space, Sphere):
        yield from _hyperbolic(x, space, exported)
        return
    yield _usearch(_PEER, x, queries, "cos")
    yield _usearch(f"{_PEER} in bfloat16", x, queries, "cos", dtype="bf16")
    if peers.installed("faiss") and not exported:
        built, near = _faiss_graph(x, "METRIC_INNER_PRODUCT")
        search = functools.partial(near, queries, _K)
        yield _Engine("faiss HNSW, cosine", built, search, _candidates())


def _hyperbolic(x: Points, ball: PoincareBall, exported: bool) -> Iterator[_Engine]:
    ids = np.arange(len(x)).astype(str)
    embeddings = Embeddings(x, ids, np.full(len(x), ""), ball, "benchmark", "benchmark", {})
    queries = x[:_QUERIES]
    started = time.perf_counter()
    gallery = GraphGallery.build(embeddings)
    built = time.perf_counter() - started
    settings = {"as exported": gallery.candidates, **_candidates()}

    def own(candidates: int) -> Items:
        gallery.candidates = candidates
        return gallery.search_rows(queries, _K)[1]

    yield _Engine(_OURS, built, own, settings)
    if exported:
        return
    vectors, asked = peers.search_vectors(ball, x)
    asked = asked[:_QUERIES]
    yield _usearch("usearch, inner product of d + 1", vectors, asked, "ip")
    yield _usearch("usearch, L2 of the ball's points", x, queries, "l2sq")
    if peers.installed("faiss"):
        yield _lists("faiss IVF, inner product of d + 1", vectors, asked)
        built, near = _faiss_graph(x, "METRIC_L2")

        def twice(candidates: int) -> Items:
            """Two searches in a graph of Euclidean distances."""
            search = functools.partial(near, candidates=candidates)
            return euclidean.nearest(search, x, queries, k=_K, space=ball, candidates=candidates)[1]

        engine = "faiss HNSW, L2, two searches (--export=faiss:hnsw)"
        yield _Engine(engine, built, twice, _candidates(least=64))


def _candidates(least: int = 0) -> dict[str, int]:
    return {f"{number} candidates": number for number in _CANDIDATES if number >= least}


def _faiss_graph(x: Points, metric: str) -> tuple[float, Callable[[Points, int, int], Items]]:
    """Seconds of building a graph, and its search for a number of neighbours by candidates."""
    import faiss

    index = faiss.IndexHNSWFlat(x.shape[1], _LINKS, getattr(faiss, metric))
    index.hnsw.efConstruction = _ADDED

    def search(q: Points, count: int, candidates: int) -> Items:
        index.hnsw.efSearch = candidates
        return index.search(q, count)[1]

    return measure.seconds(lambda: index.add(x)), search


def _usearch(
    engine: str, vectors: Points, queries: Points, metric: str, dtype: str = "f32"
) -> _Engine:
    from usearch.index import Index

    settings = dict(metric=metric, dtype=dtype, connectivity=_LINKS, expansion_add=_ADDED)
    index = Index(ndim=vectors.shape[1], **settings)
    built = measure.seconds(lambda: index.add(np.arange(len(vectors)), vectors))

    def search(candidates: int) -> Items:
        index.expansion_search = candidates
        return np.asarray(index.search(queries, _K).keys, np.int64)

    return _Engine(engine, built, search, _candidates())


def _lists(engine: str, vectors: Points, queries: Points) -> _Engine:
    import faiss

    lists = int(4 * len(vectors) ** 0.5)
    flat = faiss.IndexFlatIP(vectors.shape[1])
    index = faiss.IndexIVFFlat(flat, vectors.shape[1], lists, faiss.METRIC_INNER_PRODUCT)

    def build() -> None:
        index.train(vectors)
        index.add(vectors)

    def search(visited: int) -> Items:
        index.nprobe = visited
        return index.search(queries, _K)[1]

    settings = {f"{visited} of {lists} lists": visited for visited in _LISTS}
    return _Engine(engine, measure.seconds(build), search, settings)


def _by_ball(rows: measure.Rows) -> dict[tuple[float, int], measure.Rows]:
    """Rows of each curvature and number of coordinates, which follow each other."""
    groups = itertools.groupby(rows, operator.itemgetter("c", "dim"))
    return {ball: list(own) for ball, own in groups}


def table(rows: measure.Rows) -> str:
    """Formats recall and speed of some settings in Markdown, with a column for each ball.

    Lines below the table compare our times with those of usearch's cosine, at a recall of 0.98.
    """
    balls = {ball: f"c {ball[0]:g}, {ball[1]}" for ball in _by_ball(rows)}
    lines: dict[tuple[str, ...], dict[str, str]] = {}
    for row in rows:
        if row["setting"].startswith(_SHOWN):
            cells = lines.setdefault((row["distance"], row["engine"], row["setting"]), {})
            cells[balls[row["c"], row["dim"]]] = f"{row['recall']:.3f} · {row['rate']:,.0f}"
    titles = ("distance", "engine", "setting", *balls.values())
    shown = ((*key, *(cells.get(ball, "") for ball in titles[3:])) for key, cells in lines.items())
    return "\n".join([measure.markdown(titles, shown), "", *_ratios(rows)])


def _ratios(rows: measure.Rows) -> Iterator[str]:
    for (c, dim), own in _by_ball(rows).items():
        text = f"c = {c:g}, {dim} coordinates, recall at least {_WANTED}: "
        reached = sorted(
            (row for row in own if row["recall"] >= _WANTED), key=lambda row: row["rate"]
        )
        best = {row["engine"]: row for row in reached}  # The fastest comes last.
        if missing := {_OURS, _PEER} - best.keys():
            yield f"{text}not reached by {' and '.join(sorted(missing))}"
            continue
        ours, peer = (
            f"{row['setting']}, {row['recall']:.3f} · {row['rate']:,.0f}"
            for row in (best[_OURS], best[_PEER])
        )
        ratio = best[_PEER]["rate"] / best[_OURS]["rate"]
        yield f"{text}{ratio:.2f} times the time of usearch's cosine ({ours}; {peer})"


def draw(rows: measure.Rows, path: pathlib.Path) -> None:
    """Draws speed against missed neighbours, one panel per ball and number of coordinates."""
    balls = _by_ball(rows)
    engines = list(dict.fromkeys(row["engine"] for row in rows))
    columns = min(len(balls), 2)
    lines = -(-len(balls) // columns)
    figure = Figure(figsize=(6 * columns, 4 * lines + 1), layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False).reshape(-1)
    for axis, ((c, dim), own) in zip(axes, balls.items(), strict=False):
        for engine, marker in zip(engines, itertools.cycle("osD^vP*X")):
            points = sorted((row["rate"], row["recall"]) for row in own if row["engine"] == engine)
            missed = [max(1 - recall, _LEAST_MISSED) for _, recall in points]
            axis.plot(missed, [rate for rate, _ in points], marker=marker, label=engine)
        axis.axvline(1 - _WANTED, color="grey", linestyle=":")
        axis.set(xlabel="share of the 10 nearest that is missed", ylabel="queries per second")
        axis.set(xscale="log", yscale="log", title=f"c = {c:g}, {dim} coordinates")
        axis.invert_xaxis()
        axis.grid(alpha=0.3)
    figure.legend(*axis.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    figure.savefig(path, dpi=100)
