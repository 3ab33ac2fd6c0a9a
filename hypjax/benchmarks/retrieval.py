"""Search and recall, compared with faiss."""

import pathlib
import tempfile
from collections.abc import Callable, Iterator

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from hypjax.benchmarks import measure, peers
from hypjax.benchmarks.measure import Task, product_rate, table  # noqa: F401
from hypjax.geometry import PoincareBall, Space, Sphere
from hypjax.retrieval import nearest_neighbors, recall_at_k

_KS = (1, 10, 100, 1000)
_DIM = 128
_SPACES = {"cosine": Sphere(), "hyperbolic": PoincareBall(0.1, 2.3)}
_INSTALL = "faiss (pip install faiss-cpu)"


def rows(options: measure.Options) -> measure.Rows:
    """Measures SOP's size and a gallery of two million, or a tenth of each if quick."""
    return measure.measure(_tasks(options.quick), options.repeats)


def _tasks(quick: bool) -> Iterator[Task]:
    n, classes, streamed = (6050, 1131, 200_000) if quick else (60_500, 11_316, 2_000_000)
    rate = product_rate(_DIM)
    labels = np.random.default_rng(0).integers(0, classes, n)
    points = {name: _points(space, labels) for name, space in _SPACES.items()}
    yield from _recalls(points, labels, rate)
    yield from _neighbors(points, rate)
    yield from _collapsed(points["hyperbolic"], labels, rate)
    yield from _streamed(streamed, rate)


def _points(space: Space, labels: Int[np.ndarray, " n"]) -> Float[np.ndarray, "n d"]:
    rng = np.random.default_rng(1)
    centres = rng.normal(size=(labels.max() + 1, _DIM))
    features = centres[labels] + 1.2 * rng.normal(size=(len(labels), _DIM))
    return np.array(space.embed(features.astype(np.float32)))


def _recalls(
    points: dict[str, np.ndarray], labels: Int[np.ndarray, " n"], rate: float
) -> Iterator[Task]:
    def ours(name: str, within_queries: bool) -> Callable[[], object]:
        gallery = () if within_queries else (points[name].copy(), labels)
        return lambda: recall_at_k(points[name], labels, *gallery, ks=_KS, space=_SPACES[name])

    n = len(labels)
    product = 2 * n * n * _DIM / rate
    for within_queries in (True, False):
        words = f"Recall@{{{','.join(map(str, _KS))}}}, {n}×{n}×{_DIM}, "
        words += "within one set" if within_queries else "separate gallery"
        limit = product / 2 if within_queries else product
        peer = None
        if peers.installed("faiss"):
            peer = _faiss_recall(points["cosine"], labels, within_queries)
        name = "faiss k=1001 and hit counting" if peer else _INSTALL
        yield Task(f"{words}, cosine", ours("cosine", within_queries), peer, name, limit)
        yield Task(
            f"{words}, hyperbolic",
            ours("hyperbolic", within_queries),
            ours("cosine", within_queries),
            "ours, cosine",
            limit,
        )


def _faiss_search(
    gallery: Float[np.ndarray, "m k"], queries: Float[np.ndarray, "n k"], k: int
) -> Callable[[], tuple[np.ndarray, np.ndarray]]:
    import faiss

    def run() -> tuple[np.ndarray, np.ndarray]:
        index = faiss.IndexFlatIP(gallery.shape[1])
        index.add(gallery)
        return index.search(queries, k)

    return run


def _faiss_recall(
    points: Float[np.ndarray, "n d"], labels: Int[np.ndarray, " n"], within_queries: bool
) -> Callable[[], dict[int, float]]:
    k = max(_KS) + within_queries  # Each query also finds itself.
    search = _faiss_search(points, points, k)

    def run() -> dict[int, float]:
        _, found = search()
        first = np.full(len(found), k)
        for start in range(0, len(found), 1000):
            part = found[start : start + 1000]
            queries = np.arange(start, start + len(part))
            hits = labels[part] == labels[queries, None]
            if within_queries:
                hits &= part != queries[:, None]
            first[queries] = np.where(hits.any(axis=1), hits.argmax(axis=1), k)
        return {at: float(np.mean(first < at + within_queries)) for at in _KS}

    return run


def _neighbors(points: dict[str, np.ndarray], rate: float) -> Iterator[Task]:
    for name, space in _SPACES.items():
        x = points[name]
        product = 2 * len(x) ** 2 * _DIM / rate
        for k in (10, 100):
            peer = None
            if peers.installed("faiss"):
                peer = _faiss_search(*peers.search_vectors(space, x), k)
            yield Task(
                f"{k} nearest, {len(x)}×{len(x)}×{_DIM}, {name}",
                lambda x=x, k=k, space=space: nearest_neighbors(x, x, k=k, space=space),
                peer,
                "faiss IndexFlatIP" if peer else _INSTALL,
                product,
            )


def _collapsed(
    healthy: Float[np.ndarray, "n d"], labels: Int[np.ndarray, " n"], rate: float
) -> Iterator[Task]:
    """Three tight crowds far from each other, where products cannot tell who is nearest."""
    space, n = _SPACES["hyperbolic"], len(labels)
    rng = np.random.default_rng(3)
    centres = rng.normal(size=(3, _DIM))[rng.integers(0, 3, n)]
    features = centres + 0.003 * rng.normal(size=(n, _DIM))
    x = np.array(space.embed(features.astype(np.float32)))
    words = f"{n}×{n}×{_DIM}, hyperbolic, collapsed"
    product = 2 * n * n * _DIM / rate
    yield Task(
        f"Recall@{{{','.join(map(str, _KS))}}}, {words}",
        lambda: recall_at_k(x, labels, ks=_KS, space=space),
        lambda: recall_at_k(healthy, labels, ks=_KS, space=space),
        "ours, not collapsed",
        product / 2,
    )
    yield Task(
        f"10 nearest, {words}",
        lambda: nearest_neighbors(x, x, k=10, space=space),
        lambda: nearest_neighbors(healthy, healthy, k=10, space=space),
        "ours, not collapsed",
        product,
    )


def _streamed(items: int, rate: float) -> Iterator[Task]:
    """A gallery on disk, compared with the same gallery in memory."""
    space, queries = _SPACES["hyperbolic"], 2000
    rng = np.random.default_rng(2)
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "gallery.npy")
        shape = (items, _DIM)
        file = np.lib.format.open_memmap(path, "w+", np.float32, shape)
        for start in range(0, items, 100_000):
            part = file[start : start + 100_000]
            part[:] = space.embed(rng.normal(size=part.shape).astype(np.float32))
        file.flush()
        del file
        mapped = np.load(path, mmap_mode="r")
        x, held = np.array(mapped[:queries]), jnp.asarray(mapped)
        yield Task(
            f"100 nearest, {queries}×{items}×{_DIM} on disk, hyperbolic",
            lambda: nearest_neighbors(x, mapped, k=100, space=space),
            lambda: nearest_neighbors(x, held, k=100, space=space),
            "ours, in memory",
            2 * queries * items * _DIM / rate,
        )
