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
_BALL = PoincareBall(0.1, 2.3)
_SPACES = {"cosine": Sphere(), "hyperbolic": _BALL}
_INSTALL = "faiss (pip install faiss-cpu)"


def rows(options: measure.Options) -> measure.Rows:
    """Measures SOP's size and a gallery of two million, or a tenth of each if quick."""
    return measure.measure(_tasks(options.quick), options.repeats)


def _tasks(quick: bool) -> Iterator[Task]:
    n, classes, streamed = (6050, 1131, 200_000) if quick else (60_500, 11_316, 2_000_000)
    rate = product_rate(_DIM)
    labels = np.random.default_rng(0).integers(0, classes, n)
    points = {name: _points(space, labels) for name, space in _SPACES.items()}
    rng = np.random.default_rng(3)
    # Three tight crowds far from each other, where products cannot tell who is nearest.
    centres = rng.normal(size=(3, _DIM))[rng.integers(0, 3, n)]
    features = centres + 0.003 * rng.normal(size=(n, _DIM))
    points["collapsed"] = np.array(_BALL.embed(features.astype(np.float32)))
    product, size = 2 * n * n * _DIM / rate, f"{n}×{n}×{_DIM}"
    recall = f"Recall@{{{','.join(map(str, _KS))}}}, {size}"

    def recalls(name: str, separate: bool = False) -> Callable[[], object]:
        gallery = (points[name].copy(), labels) if separate else ()
        space = _SPACES.get(name, _BALL)
        return lambda: recall_at_k(points[name], labels, *gallery, ks=_KS, space=space)

    def nearest(name: str, k: int) -> Callable[[], object]:
        x, space = points[name], _SPACES.get(name, _BALL)
        return lambda: nearest_neighbors(x, x, k=k, space=space)

    faiss = peers.installed("faiss")
    for separate in (False, True):
        words = f"{recall}, {'separate gallery' if separate else 'within one set'}"
        limit = product if separate else product / 2
        ours, peer = recalls("cosine", separate), None
        if faiss:
            peer = _faiss_recall(points["cosine"], labels, not separate)
        name = "faiss k=1001 and hit counting" if faiss else _INSTALL
        yield Task(f"{words}, cosine", ours, peer, name, limit)
        own = recalls("hyperbolic", separate)
        yield Task(f"{words}, hyperbolic", own, ours, "ours, cosine", limit)
    for name, space in _SPACES.items():
        for k in (10, 100):
            peer = None
            if faiss:
                peer = _faiss_search(*peers.search_vectors(space, points[name]), k)
            what = "faiss IndexFlatIP" if faiss else _INSTALL
            yield Task(f"{k} nearest, {size}, {name}", nearest(name, k), peer, what, product)
    healthy, collapsed = "ours, not collapsed", "hyperbolic, collapsed"
    both = [recalls(name) for name in ("collapsed", "hyperbolic")]
    yield Task(f"{recall}, {collapsed}", *both, healthy, product / 2)
    both = [nearest(name, 10) for name in ("collapsed", "hyperbolic")]
    yield Task(f"10 nearest, {size}, {collapsed}", *both, healthy, product)
    yield from _streamed(streamed, rate)


def _points(space: Space, labels: Int[np.ndarray, " n"]) -> Float[np.ndarray, "n d"]:
    rng = np.random.default_rng(1)
    centres = rng.normal(size=(labels.max() + 1, _DIM))
    features = centres[labels] + 1.2 * rng.normal(size=(len(labels), _DIM))
    return np.array(space.embed(features.astype(np.float32)))


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


def _streamed(items: int, rate: float) -> Iterator[Task]:
    """A gallery on disk, compared with the same gallery in memory."""
    space, queries = _BALL, 2000
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
