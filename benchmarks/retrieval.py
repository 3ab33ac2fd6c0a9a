"""Search and scores, compared with faiss and pytorch-metric-learning."""

import functools
import pathlib
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from benchmarks import measure, peers
from benchmarks.measure import COLUMNS as COLUMNS
from benchmarks.measure import Task
from hypjax.geometry import PoincareBall, Sphere
from hypjax.retrieval import mean_score, nearest_neighbors, query_scores, recall_at_k

_KS = (1, 10, 100, 1000)
_DIM = 128
_SIZES = 60_500, 11_316, 2_000_000  # Points and classes as in SOP, and points on disk.
_QUICK_SIZES = 6050, 1131, 200_000
_BALL = PoincareBall(0.1, 2.3)
SPACES = {"cosine": Sphere(), "hyperbolic": _BALL, "collapsed": _BALL}
_INSTALL = "faiss (pip install faiss-cpu)"
_TOLERANCE = 1e-3  # Of scores: products in float32 may swap items at almost equal distances.


def rows(options: measure.Options) -> Iterator[dict[str, Any]]:
    """SOP's size and a gallery of two million, or a tenth of each if quick."""
    n, classes, items = _QUICK_SIZES if options.quick else _SIZES
    labels = np.random.default_rng(0).integers(0, classes, n)
    shared = np.random.default_rng(0).permutation(n) % classes  # No class has a single image.
    points = {name: points_of(name, labels) for name in ("cosine", "hyperbolic")}
    yield from measure.measure(_tasks({**points, "collapsed": _crowds(n)}, labels), options)
    yield from measure.measure([_scores(points_of("cosine", shared), shared)], options)
    with tempfile.TemporaryDirectory() as folder:
        on_disk = _streamed(pathlib.Path(folder, "gallery.npy"), items)
        yield from measure.measure([on_disk], options)


def _tasks(
    points: dict[str, Float[np.ndarray, "n d"]], labels: Int[np.ndarray, " n"]
) -> Iterator[Task]:
    n, faiss = len(labels), peers.installed("faiss")
    size = f"{n}×{n}×{_DIM}"
    recall = f"Recall@{{{','.join(map(str, _KS))}}}, {size}"

    def recalls(name: str, separate: bool = False) -> Callable[[], dict[int, float]]:
        gallery = (points[name].copy(), labels) if separate else ()
        given = points[name], labels, *gallery
        return functools.partial(recall_at_k, *given, ks=_KS, space=SPACES[name])

    def nearest(name: str, k: int) -> Callable[[], object]:
        x, space = points[name], SPACES[name]
        return functools.partial(nearest_neighbors, x, x, k=k, space=space)

    for separate in (False, True):
        words = f"{recall}, {'separate gallery' if separate else 'within one set'}"
        ours = recalls("cosine", separate)
        peer = _faiss_recall(points["cosine"], labels, not separate) if faiss else None
        name = "faiss k=1001 and hit counting" if faiss else _INSTALL
        yield Task(f"{words}, cosine", ours, peer, name)
        own = recalls("hyperbolic", separate)
        yield Task(f"{words}, hyperbolic", own, ours, "ours, cosine")
    for name in ("cosine", "hyperbolic"):
        for k in (10, 100):
            peer = peers.faiss_search(SPACES[name], points[name], k) if faiss else None
            what = "faiss IndexFlatIP" if faiss else _INSTALL
            yield Task(f"{k} nearest, {size}, {name}", nearest(name, k), peer, what)
    healthy, collapsed = "ours, not collapsed", "hyperbolic, collapsed"
    both = [recalls(name) for name in ("collapsed", "hyperbolic")]
    yield Task(f"{recall}, {collapsed}", *both, healthy)
    both = [nearest(name, 10) for name in ("collapsed", "hyperbolic")]
    yield Task(f"10 nearest, {size}, {collapsed}", *both, healthy)


def points_of(name: str, labels: Int[np.ndarray, " n"]) -> Float[np.ndarray, "n d"]:
    """Points of one of `SPACES` that lie around the centre of their class."""
    rng = np.random.default_rng(1)
    centres = rng.normal(size=(labels.max() + 1, _DIM))
    features = centres[labels] + 1.2 * rng.normal(size=(len(labels), _DIM))
    return np.array(SPACES[name].embed(features.astype(np.float32)))


def _crowds(n: int) -> Float[np.ndarray, "n d"]:
    """Three tight crowds far from each other, where products cannot tell who is nearest."""
    rng = np.random.default_rng(3)
    centres = rng.normal(size=(3, _DIM))[rng.integers(0, 3, n)]
    features = centres + 0.003 * rng.normal(size=(n, _DIM))
    return np.array(_BALL.embed(features.astype(np.float32)))


def _faiss_recall(
    points: Float[np.ndarray, "n d"], labels: Int[np.ndarray, " n"], within_queries: bool
) -> Callable[[], dict[int, float]]:
    k = max(_KS) + within_queries  # Each query also finds itself.
    search = peers.faiss_search(SPACES["cosine"], points, k)

    def run() -> dict[int, float]:
        _, found = search()
        hits = labels[found] == labels[:, None]
        if within_queries:
            hits &= found != np.arange(len(found))[:, None]
        first = np.where(hits.any(axis=1), hits.argmax(axis=1), k)
        return {at: float(np.mean(first < at + within_queries)) for at in _KS}

    return run


def _scores(points: Float[np.ndarray, "n d"], labels: Int[np.ndarray, " n"]) -> Task:
    """Scores of points on the sphere; pytorch-metric-learning must find the same with faiss."""
    package, latest = "pytorch-metric-learning", {}
    theirs = {"recall@1": "precision_at_1", "r_precision": "r_precision"}
    theirs |= {"map@r": "mean_average_precision_at_r"}

    def ours() -> None:
        found = query_scores(points, labels, metrics=tuple(theirs), space=SPACES["cosine"])
        latest.update({name: mean_score(values) for name, values in found.items()})

    def peer() -> None:
        import torch
        from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator

        calculator = AccuracyCalculator(
            include=tuple(theirs.values()), k="max_bin_count", device=torch.device("cpu")
        )
        found = calculator.get_accuracy(points, labels)
        for name, score in latest.items():
            np.testing.assert_allclose(found[theirs[name]], score, atol=_TOLERANCE, err_msg=name)

    installed = peers.installed("torch", "faiss", package.replace("-", "_"))
    return Task(
        f"{', '.join(theirs)}, {len(points)}×{len(points)}×{_DIM}, cosine",
        ours,
        peer if installed else None,
        package if installed else f"pip install {package}",
    )


def _streamed(path: pathlib.Path, items: int) -> Task:
    """A gallery on disk, compared with the same gallery in memory."""
    queries, rng = 2000, np.random.default_rng(2)
    file = np.lib.format.open_memmap(path, "w+", np.float32, (items, _DIM))
    for start in range(0, items, 100_000):
        part = file[start : start + 100_000]
        part[:] = _BALL.embed(rng.normal(size=part.shape).astype(np.float32))
    file.flush()
    del file
    mapped = np.load(path, mmap_mode="r")
    x, held = np.array(mapped[:queries]), jnp.asarray(mapped)
    return Task(
        f"100 nearest, {queries}×{items}×{_DIM} on disk, hyperbolic",
        lambda: nearest_neighbors(x, mapped, k=100, space=_BALL),
        lambda: nearest_neighbors(x, held, k=100, space=_BALL),
        "ours, in memory",
    )
