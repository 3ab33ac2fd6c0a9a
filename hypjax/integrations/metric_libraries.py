"""Scores by metrics of other libraries, called as their manuals say, and why they may differ."""

from collections.abc import Sequence

import numpy as np

from hypjax.data.splits import Task
from hypjax.galleries.embeddings import Embeddings
from hypjax.geometry.spaces import distance_matrix

_TORCHMETRICS = {"recall": "hit_rate", "precision": "precision", "map": "average_precision"}
_TORCHMETRICS |= {"mrr": "reciprocal_rank", "r_precision": "r_precision"}
_PML = {"recall@1": "precision_at_1", "r_precision": "r_precision"}
_PML |= {"map@r": "mean_average_precision_at_r"}
Figures = dict[str, tuple[str, float, str]]  # By hypjax's metric: name, mean, why it may differ.


def by_torchmetrics(task: Task[Embeddings], metrics: Sequence[str]) -> Figures:
    """Takes cosines on the sphere, and negated distances elsewhere."""
    import torch
    from torchmetrics.functional import retrieval

    queries, gallery = task.queries, task.gallery or task.queries
    kinds = {x: x.split("@") for x in metrics if x != "map@r" and x.split("@")[0] in _TORCHMETRICS}
    values: dict[str, list[float]] = {x: [] for x in kinds}
    any_missed = False
    for query, label in enumerate(queries.labels):
        own: Sequence[int] = (
            task.own_rows[query] if len(task.own_rows) else [] if task.gallery else [query]
        )
        row = distance_matrix(queries.space, queries.vectors[[query]], gallery.vectors)[0]
        scores = np.delete(1 - row / 2 if queries.space.normalized else -row, own)
        is_relevant = np.delete(gallery.labels == label, own)
        any_missed |= bool((scores[is_relevant] <= 0).any())
        pair = torch.tensor(scores), torch.tensor(is_relevant)
        for name, (kind, *k) in kinds.items():
            function = getattr(retrieval, f"retrieval_{_TORCHMETRICS[kind]}")
            values[name].append(float(function(*pair, *map(int, k))))
    unseen = "queries without positives count as 0 (#no-positives)"
    missed = "relevant items with scores of 0 or below count as missed (#scores-of-0)"
    why = {x: unseen if x.startswith("r") or not any_missed else missed for x in kinds}
    return {x: (_TORCHMETRICS[kinds[x][0]], float(np.mean(y)), why[x]) for x, y in values.items()}


def by_pml(task: Task[Embeddings], metrics: Sequence[str]) -> Figures:
    """Takes points, which pytorch-metric-learning compares by Euclidean distance."""
    import torch
    from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator

    names = {x: _PML[x] for x in metrics if x in _PML}
    tables = [task.queries, task.gallery or task.queries]
    labels = np.concatenate([x.labels for x in tables])
    classes, numbers = np.unique(labels, return_inverse=True)
    if all(label.isdecimal() and len(label) < 19 for label in classes.tolist()):
        as_integers = classes.astype(np.int64)
        if len(np.unique(as_integers)) == len(classes):  # "1" and "01" are two classes.
            numbers = as_integers[numbers]
    of_queries, of_gallery = np.split(numbers, [len(task.queries)])
    x, y = (np.asarray(table.vectors, np.float32) for table in tables)
    include = tuple(names.values()) or ("r_precision",)  # An empty tuple stands for all metrics.
    calculator = AccuracyCalculator(include=include, k="max_bin_count", device=torch.device("cpu"))
    scores = calculator.get_accuracy(x, of_queries, y, of_gallery, task.gallery is None)
    why = "points are compared by Euclidean distance (#flat-distances)"
    least_own = 0 if task.gallery else 1  # Which pytorch-metric-learning leaves out itself.
    if max(map(len, task.own_rows), default=least_own) > least_own:
        why = "own images and their copies are found, which hypjax leaves out"
    elif numbers.max() > 2**24:
        why = "class numbers above 2^24 merge (#labels-as-floats)"
    return {x: (name, scores[name], why) for x, name in names.items()}
