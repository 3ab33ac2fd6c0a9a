"""Scores of embeddings, compared with those of libraries for metric learning."""

from collections.abc import Callable, Iterator

import numpy as np
from jaxtyping import Float, Int

from benchmarks import peers
from benchmarks.measure import Task, product_seconds
from hypjax.geometry import Sphere
from hypjax.retrieval import mean_score, query_scores

_KS = (1, 10, 100, 1000)
_TOLERANCE = 1e-3  # Products in float32 may swap items at almost equal distances.
Scores = dict[str, float]
Points, Labels = Float[np.ndarray, "n d"], Int[np.ndarray, " n"]


def tasks(points: Points, labels: Labels) -> Iterator[Task]:
    """Scores of points on the sphere among themselves; each library must find the same."""
    for library, modules, peer in (
        ("pytorch-metric-learning", ("pytorch_metric_learning", "faiss"), metric_learning),
        ("open-metric-learning", ("oml.functional.knn", "oml.functional.metrics"), open_metric),
    ):
        metrics, theirs = peer(points, labels)
        missing = not peers.installed("torch", *modules)
        ours, theirs = _compared(lambda metrics=metrics: scores(points, labels, metrics), theirs)
        yield Task(
            f"{', '.join(metrics)}, {len(points)}×{len(points)}×{points.shape[1]}, cosine",
            ours,
            None if missing else theirs,
            f"pip install {library}" if missing else library,
            product_seconds(len(points), *points.shape),
        )


def scores(points: Points, labels: Labels, metrics: tuple[str, ...]) -> Scores:
    """Means over queries of metrics, as the command `score` computes them."""
    found = query_scores(points, labels, metrics=metrics, space=Sphere())
    return {name: mean_score(values) for name, values in found.items()}


def _compared(
    ours: Callable[[], Scores], theirs: Callable[[], Scores]
) -> tuple[Callable[[], None], Callable[[], None]]:
    """Calls whose scores are compared with the latest ones of the other."""
    latest: Scores = {}

    def run_ours() -> None:
        latest.update(ours())

    def run_theirs() -> None:
        for name, score in theirs().items():
            np.testing.assert_allclose(score, latest[name], atol=_TOLERANCE, err_msg=name)

    return run_ours, run_theirs


def metric_learning(points: Points, labels: Labels) -> tuple[tuple[str, ...], Callable[[], Scores]]:
    """The metrics of pytorch-metric-learning, and what computes them by its search with faiss."""

    def run() -> Scores:
        import torch
        from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator

        names = {
            "recall@1": "precision_at_1",
            "r_precision": "r_precision",
            "map@r": "mean_average_precision_at_r",
        }
        calculator = AccuracyCalculator(
            include=tuple(names.values()), k="max_bin_count", device=torch.device("cpu")
        )
        found = calculator.get_accuracy(points, labels)
        return {name: found[theirs] for name, theirs in names.items()}

    return ("recall@1", "r_precision", "map@r"), run


def open_metric(points: Points, labels: Labels) -> tuple[tuple[str, ...], Callable[[], Scores]]:
    """The recalls of open-metric-learning, and what computes them by its search."""

    def run() -> Scores:
        import torch
        from oml.functional.knn import batched_knn
        from oml.functional.metrics import calc_retrieval_metrics

        ids = torch.arange(len(points))
        _, found, wanted = batched_knn(
            torch.from_numpy(points), ids, ids, max(_KS), labels_gt=torch.from_numpy(labels)
        )
        options = {"precision_top_k": (), "map_top_k": (), "verbose": False}
        metrics = calc_retrieval_metrics(found, wanted, cmc_top_k=_KS, **options)
        return {f"recall@{k}": float(metrics["cmc"][k]) for k in _KS}

    return tuple(f"recall@{k}" for k in _KS), run
