"""Speed of search and scores, compared with faiss and pytorch-metric-learning."""

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
_SIZES = 60_500, 11_316, 2_000_000  # Points and classes, as in SOP, and points on disk.
_QUICK_SIZES = 6050, 1131, 200_000
_BALL = PoincareBall(0.1, 2.3)
SPACES = {"cosine": Sphere(), "hyperbolic": _BALL, "collapsed": _BALL}
_INSTALL = "faiss (pip install faiss-cpu)"
_TOLERANCE = 1e-3  # Of scores: products in float32 may swap items at almost equal distances.


def rows(options: measure.Options) -> Iterator[dict[str, Any]]:
    """Times searches in SOP's size and in two million points, or in a tenth of each if quick."""
    n, classes, items = _QUICK_SIZES if options.quick else _SIZES
    labels = np.random.default_rng(0).integers(0, classes, n)
    shared = np.random.default_rng(0).permutation(n) % classes  # No class has a single image.
    points = {name: points_of(name, labels) for name in ("cosine", "hyperbolic")}
    yield from measure.measure(_tasks({**points, "collapsed": _crowds(n)}, labels), options)
    yield from measure.measure([_score_task(points_of("cosine", shared), shared)], options)
    with tempfile.TemporaryDirectory() as folder:
        on_disk = _disk_task(pathlib.Path(folder, "gallery.npy"), items)
        yield from measure.measure([on_disk], options)


def _tasks(
    points: dict[str, Float[np.ndarray, "n d"]], labels: Int[np.ndarray, " n"]
) -> Iterator[Task]:
    n, faiss = len(labels), peers.installed("faiss")
    size = f"{n}×{n}×{_DIM}"
    recall = f"Recall@{{{','.join(map(str, _KS))}}}, {size}"

    def recalls(name: str, separate: bool = False) -> Callable[[], dict[int, float]]:
        gallery = (points[name].copy(), labels) if separate else ()
        arrays = points[name], labels, *gallery
        return functools.partial(recall_at_k, *arrays, ks=_KS, space=SPACES[name])

    def nearest(name: str, k: int) -> Callable[[], object]:
        x, space = points[name], SPACES[name]
        return functools.partial(nearest_neighbors, x, x, k=k, space=space)

    for separate in (False, True):
        task = f"{recall}, {'separate gallery' if separate else 'within one set'}"
        cosine, hyperbolic = recalls("cosine", separate), recalls("hyperbolic", separate)
        peer = _faiss_recall(points["cosine"], labels, not separate) if faiss else None
        peer_name = "faiss k=1001 and hit counting" if faiss else _INSTALL
        yield Task(f"{task}, cosine", cosine, peer, peer_name)
        yield Task(f"{task}, hyperbolic", hyperbolic, cosine, "ours, cosine")
    for name in ("cosine", "hyperbolic"):
        for k in (10, 100):
            peer = peers.faiss_search(SPACES[name], points[name], k) if faiss else None
            peer_name = "faiss IndexFlatIP" if faiss else _INSTALL
            yield Task(f"{k} nearest, {size}, {name}", nearest(name, k), peer, peer_name)
    suffix, peer_name = "hyperbolic, collapsed", "ours, not collapsed"
    calls = recalls("collapsed"), recalls("hyperbolic")
    yield Task(f"{recall}, {suffix}", *calls, peer_name)
    calls = nearest("collapsed", 10), nearest("hyperbolic", 10)
    yield Task(f"10 nearest, {size}, {suffix}", *calls, peer_name)


def points_of(name: str, labels: Int[np.ndarray, " n"]) -> Float[np.ndarray, "n d"]:
    """Points of one of `SPACES`, scattered around the centres of their classes."""
    rng = np.random.default_rng(1)
    centres = rng.normal(size=(labels.max() + 1, _DIM))
    features = centres[labels] + 1.2 * rng.normal(size=(len(labels), _DIM))
    return np.array(SPACES[name].embed(features.astype(np.float32)))


def _crowds(n: int) -> Float[np.ndarray, "n d"]:
    """Three tight crowds, in which inner products are too coarse to tell the nearest point."""
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
        _, neighbours = search()
        hits = labels[neighbours] == labels[:, None]
        if within_queries:
            hits &= neighbours != np.arange(len(neighbours))[:, None]
        first_hit = np.where(hits.any(axis=1), hits.argmax(axis=1), k)
        return {at: float(np.mean(first_hit < at + within_queries)) for at in _KS}

    return run


def _score_task(points: Float[np.ndarray, "n d"], labels: Int[np.ndarray, " n"]) -> Task:
    """Scores of points on the sphere; fails if pytorch-metric-learning's scores differ."""
    package, latest = "pytorch-metric-learning", {}
    peer_names = {"recall@1": "precision_at_1", "r_precision": "r_precision"}
    peer_names |= {"map@r": "mean_average_precision_at_r"}

    def ours() -> None:
        scores = query_scores(points, labels, metrics=tuple(peer_names), space=SPACES["cosine"])
        latest.update({name: mean_score(values) for name, values in scores.items()})

    def peer() -> None:
        import torch
        from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator

        calculator = AccuracyCalculator(
            include=tuple(peer_names.values()), k="max_bin_count", device=torch.device("cpu")
        )
        scores = calculator.get_accuracy(points, labels)
        for name, score in latest.items():
            peer_score = scores[peer_names[name]]
            np.testing.assert_allclose(peer_score, score, atol=_TOLERANCE, err_msg=name)

    installed = peers.installed("torch", "faiss", package.replace("-", "_"))
    return Task(
        f"{', '.join(peer_names)}, {len(points)}×{len(points)}×{_DIM}, cosine",
        ours,
        peer if installed else None,
        package if installed else f"pip install {package}",
    )


def _disk_task(path: pathlib.Path, items: int) -> Task:
    """Search of a gallery on disk, compared with the same gallery in memory."""
    queries, rng = 2000, np.random.default_rng(2)
    file = np.lib.format.open_memmap(path, "w+", np.float32, (items, _DIM))
    for start in range(0, items, 100_000):
        block = file[start : start + 100_000]
        block[:] = _BALL.embed(rng.normal(size=block.shape).astype(np.float32))
    file.flush()
    del file
    mapped = np.load(path, mmap_mode="r")
    x, in_memory = np.array(mapped[:queries]), jnp.asarray(mapped)
    return Task(
        f"100 nearest, {queries}×{items}×{_DIM} on disk, hyperbolic",
        lambda: nearest_neighbors(x, mapped, k=100, space=_BALL),
        lambda: nearest_neighbors(x, in_memory, k=100, space=_BALL),
        "ours, in memory",
    )
