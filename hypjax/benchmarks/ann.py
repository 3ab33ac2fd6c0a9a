"""Recall and speed of approximate searches, compared with the exact one and with cosine."""

import contextlib
import functools
import itertools
import pathlib
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float32, Int
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from hypjax.benchmarks import peers
from hypjax.engines import euclidean, qdrant_folders
from hypjax.engines.graph import GraphGallery
from hypjax.engines.qdrant import QdrantGallery
from hypjax.errors import UserError
from hypjax.geometry import PoincareBall, Space, Sphere
from hypjax.retrieval import nearest_neighbors
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


class _Engine(NamedTuple):
    """A search of an engine in one setting.

    Attributes:
        engine: Name of the engine.
        setting: Name of the setting.
        built: Seconds of building the index.
        search: From query vectors to indices of neighbours, [queries, 10].
        queries: The query vectors.
    """

    engine: str
    setting: str
    built: float
    search: Callable[[Float32[np.ndarray, "q e"]], Int[np.ndarray, "q k"]]
    queries: Float32[np.ndarray, "q e"]


def rows(
    quick: bool, repeats: int = 5, points: int | None = None, exported: bool = False
) -> Iterator[dict[str, Any]]:
    """Yields one row per ball, number of coordinates, engine and setting.

    Each has the share of the 10 nearest neighbours that were found, queries per second and the
    seconds of building the index. Cosine is measured on the same features, against its own exact
    neighbours. Times are medians of rounds that run all searches, in a random order, so that a
    change in the speed of the machine affects all alike.

    Args:
        quick: Whether to take one ball, few points, and one round.
        repeats: Number of rounds, after one that counts only for slow searches.
        points: Number of points.
        exported: Whether to leave out engines other than usearch's graphs by cosine and by the
            own distance, which takes a tenth of the time.

    Raises:
        UserError: usearch or numba is not installed.
    """
    if not peers.installed("usearch", "numba"):
        raise UserError('ann requires usearch and numba: pip install "hypjax[ann]"')
    count = points or (_QUICK_COUNT if quick else _COUNT)
    for ball, dim in _SETTINGS[-1:] if quick else _SETTINGS:
        features = _features(count, dim)
        engines = []
        with contextlib.ExitStack() as stack:
            for space in (ball, Sphere()):
                x = np.asarray(space.embed(features))
                name = "cosine" if isinstance(space, Sphere) else "hyperbolic"
                true = _exact(x[:_QUERIES], x, space)
                exact = functools.partial(_exact, gallery=x, space=space)
                found = [_Engine("hypjax", "exact", 0.0, exact, x[:_QUERIES])]
                more = _cosine if name == "cosine" else functools.partial(_hyperbolic, ball=space)
                found += more(x, stack, exported)
                engines += [(name, true, engine) for engine in found]
            seconds, recalls = _measure(engines, 1 if quick else repeats)
        for (name, _, engine), taken, recall in zip(engines, seconds, recalls, strict=True):
            yield {
                **{"c": float(ball.c), "dim": dim, "points": count, "distance": name},
                **{"engine": engine.engine, "setting": engine.setting},
                **{"recall": recall, "rate": _QUERIES / taken, "build": engine.built},
            }


def _measure(
    engines: Sequence[tuple[str, Int[np.ndarray, "q k"], _Engine]], repeats: int
) -> tuple[list[float], list[float]]:
    """Seconds and recall of each search, in rounds."""
    seconds, recalls = [], []
    for _, true, engine in engines:
        found, first = _timed(lambda engine=engine: engine.search(engine.queries))
        seconds.append([first])
        recalls.append(_recall(found, true))
    rng = np.random.default_rng(0)
    for _ in range(repeats):
        for i in rng.permutation(len(engines)):
            engine = engines[i][-1]
            if seconds[i][0] < _SLOW:
                seconds[i].append(_timed(lambda engine=engine: engine.search(engine.queries))[1])
    return [float(np.median(taken[1:] or taken)) for taken in seconds], recalls


def _features(count: int, dim: int) -> Float32[np.ndarray, "n d"]:
    """Clusters of 20, with norms from 0.66 to 3.3: up to √c‖x‖ = 0.62 and 0.997 in the balls."""
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(count // 20, dim))
    features = centres[rng.integers(0, len(centres), count)] + 0.7 * rng.normal(size=(count, dim))
    norms = 3.3 * rng.uniform(0.2, 1, size=(count, 1))
    return (features * norms / np.linalg.norm(features, axis=1, keepdims=True)).astype(np.float32)


def _exact(
    queries: Float32[np.ndarray, "q d"], gallery: Float32[np.ndarray, "n d"], space: Space
) -> Int[np.ndarray, "q k"]:
    return nearest_neighbors(queries, gallery, k=_K, space=space)[1]


def _hyperbolic(
    x: Float32[np.ndarray, "n d"], stack: contextlib.ExitStack, exported: bool, ball: PoincareBall
) -> Iterator[_Engine]:
    gallery, built = _timed(lambda: GraphGallery.build(_embeddings(x, ball)))
    chosen = gallery.candidates

    def own(q: np.ndarray, candidates: int) -> np.ndarray:
        gallery.candidates = candidates
        return gallery.nearest(q, _K)[1]

    for name, number in [("as exported", chosen), *_candidates()]:
        search = functools.partial(own, candidates=number)
        yield _Engine(_OURS, name, built, search, x[:_QUERIES])
    if exported:
        return
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
        yield from _qdrant(x, ball, stack)


def _cosine(
    x: Float32[np.ndarray, "n d"], stack: contextlib.ExitStack, exported: bool
) -> Iterator[_Engine]:
    yield from _usearch(_PEER, x, x[:_QUERIES], "cos")
    yield from _usearch(f"{_PEER} in bfloat16", x, x[:_QUERIES], "cos", dtype="bf16")
    if peers.installed("faiss") and not exported:
        import faiss

        index, built = _faiss_graph(x, faiss.METRIC_INNER_PRODUCT)

        def search(q: np.ndarray, candidates: int) -> np.ndarray:
            index.hnsw.efSearch = candidates
            return index.search(q, _K)[1]

        for name, number in _candidates():
            found = functools.partial(search, candidates=number)
            yield _Engine("faiss HNSW, cosine", name, built, found, x[:_QUERIES])


def _twice(x: Float32[np.ndarray, "n d"], ball: PoincareBall) -> Iterator[_Engine]:
    """A graph of Euclidean distances, searched twice."""
    import faiss

    index, built = _faiss_graph(x, faiss.METRIC_L2)

    def search(q: np.ndarray, candidates: int) -> np.ndarray:
        index.hnsw.efSearch = candidates
        near = lambda points, count: index.search(points, count)[1]  # noqa: E731
        return euclidean.nearest(near, x, q, k=_K, space=ball, candidates=candidates)[1]

    engine = "faiss HNSW, L2, two searches (--export=faiss:hnsw)"
    for name, number in _candidates(least=64):
        found = functools.partial(search, candidates=number)
        yield _Engine(engine, name, built, found, x[:_QUERIES])


def _qdrant(
    x: Float32[np.ndarray, "n d"], ball: PoincareBall, stack: contextlib.ExitStack
) -> Iterator[_Engine]:
    """The engine of Qdrant, embedded."""
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    embeddings = _embeddings(x, ball)
    engine = qdrant_folders.Folder(pathlib.Path(folder) / "gallery.qdrant")
    gallery = QdrantGallery.create(engine, embeddings)
    _, built = _timed(lambda: gallery.add(embeddings))

    def search(q: np.ndarray, candidates: int) -> np.ndarray:
        gallery.candidates = candidates
        return np.array([[int(name) for name in hits.ids] for hits in gallery.nearest(q, _K)])

    for name, number in _candidates(least=64):
        found = functools.partial(search, candidates=number)
        yield _Engine("Qdrant, embedded (--export=qdrant)", name, built, found, x[:_QUERIES])


def _candidates(least: int = 0) -> Iterator[tuple[str, int]]:
    return ((f"{number} candidates", number) for number in _CANDIDATES if number >= least)


def _faiss_graph(x: Float32[np.ndarray, "n d"], metric: int) -> tuple[Any, float]:
    """A graph, and seconds of building it."""
    import faiss

    index = faiss.IndexHNSWFlat(x.shape[1], _LINKS, metric)
    index.hnsw.efConstruction = _ADDED
    return index, _timed(lambda: index.add(x))[1]


def _usearch(
    engine: str, vectors: np.ndarray, queries: np.ndarray, metric: str, dtype: str = "f32"
) -> Iterator[_Engine]:
    from usearch.index import Index

    index = Index(
        ndim=vectors.shape[1],
        metric=metric,
        dtype=dtype,
        connectivity=_LINKS,
        expansion_add=_ADDED,
    )
    _, built = _timed(lambda: index.add(np.arange(len(vectors)), vectors))

    def search(q: np.ndarray, candidates: int) -> np.ndarray:
        index.expansion_search = candidates
        return np.asarray(index.search(q, _K).keys, np.int64)

    for name, number in _candidates():
        found = functools.partial(search, candidates=number)
        yield _Engine(engine, name, built, found, queries)


def _lists(engine: str, vectors: np.ndarray, queries: np.ndarray) -> Iterator[_Engine]:
    import faiss

    lists = int(4 * len(vectors) ** 0.5)
    flat = faiss.IndexFlatIP(vectors.shape[1])
    index = faiss.IndexIVFFlat(flat, vectors.shape[1], lists, faiss.METRIC_INNER_PRODUCT)

    def build() -> None:
        index.train(vectors)
        index.add(vectors)

    def search(q: np.ndarray, visited: int) -> np.ndarray:
        index.nprobe = visited
        return index.search(q, _K)[1]

    _, built = _timed(build)
    for visited in _LISTS:
        found = functools.partial(search, visited=visited)
        yield _Engine(engine, f"{visited} of {lists} lists", built, found, queries)


def _embeddings(x: Float32[np.ndarray, "n d"], space: Space) -> Embeddings:
    ids = np.arange(len(x)).astype(str)
    return Embeddings(x, ids, np.full(len(x), ""), space, "benchmark", "benchmark", {})


def _timed(run: Callable[[], Any]) -> tuple[Any, float]:
    """The result of a function, and its seconds."""
    started = time.perf_counter()
    found = run()
    return found, time.perf_counter() - started


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
    """Draws speed against missed neighbours, one panel per ball and number of coordinates.

    Args:
        rows: What `rows` yields.
        path: Figure to write.
    """
    settings = list(dict.fromkeys((row["c"], row["dim"]) for row in rows))
    engines = list(dict.fromkeys(row["engine"] for row in rows))
    columns = min(len(settings), 2)
    lines = -(-len(settings) // columns)
    figure = Figure(figsize=(6 * columns, 4 * lines + 1), layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False).reshape(-1)
    for axis, (c, dim) in zip(axes, settings, strict=False):
        for engine, marker in zip(engines, itertools.cycle("osD^vP*X")):
            own = [row for row in rows if (row["c"], row["dim"]) == (c, dim)]
            own = [row for row in own if row["engine"] == engine]
            own = sorted(own, key=lambda row: row["rate"])
            missed = [max(1 - row["recall"], _LEAST_MISSED) for row in own]
            axis.plot(missed, [row["rate"] for row in own], marker=marker, label=engine)
        axis.axvline(1 - _WANTED, color="grey", linestyle=":")
        axis.set(xlabel="share of the 10 nearest that is missed", ylabel="queries per second")
        axis.set(xscale="log", yscale="log")
        axis.invert_xaxis()
        axis.set_title(f"c = {c:g}, {dim} coordinates")
        axis.grid(alpha=0.3)
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2)
    FigureCanvasAgg(figure)
    figure.savefig(path, dpi=100)


def _ratios(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    for c, dim in dict.fromkeys((row["c"], row["dim"]) for row in rows):
        best = {}
        for engine in (_OURS, _PEER):
            enough = [
                row
                for row in rows
                if (row["c"], row["dim"], row["engine"]) == (c, dim, engine)
                and row["recall"] >= _WANTED
            ]
            best[engine] = max(enough, key=lambda row: row["rate"], default=None)
        text = f"c = {c:g}, {dim} coordinates, recall at least {_WANTED}: "
        if None in best.values():
            missing = [name for name, row in best.items() if row is None]
            yield f"{text}not reached by {' and '.join(missing)}"
        else:
            ours, peer = best.values()
            yield (
                f"{text}{peer['rate'] / ours['rate']:.2f} times the time of usearch's cosine "
                f"({ours['setting']}, {ours['recall']:.3f} · {ours['rate']:,.0f}; "
                f"{peer['setting']}, {peer['recall']:.3f} · {peer['rate']:,.0f})"
            )
