"""Scores of embeddings in files, computed by any model."""

import itertools
import pathlib
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from hypjax.data.ground_truth import Benchmark
from hypjax.data.parts import Splits, Task
from hypjax.data.repeats import queries_in_gallery, sharing_files
from hypjax.errors import UserError
from hypjax.retrieval import (
    LEVELS,
    bootstrap_intervals,
    graded_scores,
    mean_score,
    query_scores,
    relevance_at,
    relevance_scores,
)
from hypjax.retrieval.embeddings import Embeddings
from hypjax.retrieval.graded import GRADED
from hypjax.retrieval.inputs import check_count
from hypjax.retrieval.own_images import OwnImages, copies
from hypjax.system import console
from hypjax.types import GroundTruth, coarse_levels

_Points = Float[np.ndarray, "n d"]
_Scores = dict[str, Float[np.ndarray, " queries"]]  # By metric.

_SCORED_BY = "vectors", "labels", "coarse_labels"  # Columns.


def task_of(
    embeddings: Embeddings,
    queries: Embeddings | None = None,
    benchmark: Benchmark | None = None,
    ground_truth: GroundTruth | None = None,
    *,
    keep_self: bool = False,
) -> Task[Embeddings]:
    """The search by which embeddings are scored.

    Without queries, the split `query` searches `gallery`, or else the split `test`, or else all
    embeddings search each other. `ground_truth` describes the images of `query` and `gallery`, in
    order. A query in the gallery does not find itself, unless `keep_self`; the rule is that of
    `hypjax.retrieval.own_images`.
    """
    if queries is not None and str(queries.space) != str(embeddings.space):
        problem = f"the queries are in {queries.space}, but the gallery in {embeddings.space}"
        raise UserError(f"{problem}; name one --space")
    if queries is not None and len({queries.fingerprint, embeddings.fingerprint} - {""}) > 1:
        raise UserError("queries and gallery were embedded by different models; use one")
    if benchmark is not None:
        if queries is None:
            raise UserError("a ground truth needs --queries")
        queries = queries.take(_rows_of(queries, benchmark.queries, "queries"))
        items = embeddings.take(_rows_of(embeddings, benchmark.gallery, "images to search"))
        if left := len(embeddings) - len(items):
            console.say(f"{left} images that the ground truth does not name are left out")
        return Task(queries, items, benchmark.ground_truth)
    task = Task(queries, embeddings) if queries else _by_splits(embeddings)
    if ground_truth is not None:
        if embeddings.unreadable:
            missing = f"{len(embeddings.unreadable)} of the images with ground truth"
            raise UserError(f"{missing} could not be read; prepare the dataset again")
        return task._replace(ground_truth=ground_truth)
    for part in filter(None, task[:2]):
        if len(unknown := np.flatnonzero(part.labels == "")):
            raise UserError(
                f"the classes of {len(unknown)} of {len(part)} rows are unknown, such as row "
                f"{unknown[0]}; leave them out, or give classes as the array labels, by --labels, "
                "--query_labels or sub-folders of --images, or name a --dataset with ground truth"
            )
    return task if keep_self else _without_own_images(task, one_table=queries is None)


def _without_own_images(task: Task[Embeddings], *, one_table: bool) -> Task[Embeddings]:
    """The search in which no query finds its own image; says how many queries have one."""
    queries, gallery = task[:2]
    if gallery is None:
        excluded_rows = copies(queries.ids.tolist())
        note = sharing_files(excluded_rows)
    else:
        images = OwnImages(gallery.ids.tolist(), gallery.vectors)
        excluded_rows = images.rows(queries.ids.tolist(), queries.vectors, one_table=one_table)
        note = queries_in_gallery(excluded_rows)
    if note:
        console.say(f"{note} (with --keep_self they do)")
    if gallery is not None and excluded_rows == [[i] for i in range(len(gallery))]:
        columns = [(getattr(x, name) for x in task[:2]) for name in _SCORED_BY]
        if all(np.array_equal(*column) for column in columns):
            return Task(gallery)  # Which takes half the time.
    return task._replace(own_rows=excluded_rows)


def require_images(embeddings: Embeddings, splits: Splits) -> None:
    """Raises a `UserError` if a prepared dataset's images did not give these embeddings."""
    known = {splits.images(scored=scored).fingerprint for scored in (False, True)}
    if embeddings.images_fingerprint not in known:
        raise UserError(
            f"the embeddings are not known to be of this copy of {splits.name}; embed it with "
            "python -m hypjax.embed --dataset, or give a --ground_truth"
        )


def _by_splits(embeddings: Embeddings) -> Task[Embeddings]:
    if embeddings.splits is None:
        return Task(embeddings)
    parts = {
        name: embeddings.take(np.flatnonzero(embeddings.splits == name))
        for name in ("query", "gallery", "test")
        if name in embeddings.splits
    }
    if "test" in parts:
        return Task(parts["test"])
    if parts.keys() == {"query", "gallery"}:
        return Task(parts["query"], parts["gallery"])
    splits = ", ".join(np.unique(embeddings.splits))
    raise UserError(f"the rows have the splits {splits}; they need test, or query and gallery")


def _rows_of(embeddings: Embeddings, names: Sequence[str], what: str) -> Int[np.ndarray, " names"]:
    """Rows of the images that a ground truth names, or all in order if ids are row numbers."""
    rows = {pathlib.PurePath(name).stem: row for row, name in enumerate(embeddings.ids.tolist())}
    missing = [name for name in names if name not in rows]
    if missing and list(rows) == list(map(str, range(len(names)))):
        return np.arange(len(names))
    if missing:
        raise UserError(
            f"the ground truth has {len(names)} {what}, such as {missing[0]}, which is not among "
            f"the {len(embeddings)} embeddings; give names as the array ids, or all in order"
        )
    return np.array([rows[name] for name in names])


def graded_metrics(task: Task) -> list[str]:
    """The metrics by which a task is scored because all its images have coarse labels."""
    columns = [part.coarse_labels for part in filter(None, task[:2])]
    return list(GRADED) if all(x is not None and "" not in x for x in columns) else []


def _graded(task: Task, queries: _Points, gallery: _Points | None, **options: Any) -> _Scores:
    """Scores by the classes and, if there are any, all levels of the coarse labels."""
    parts = [*filter(None, task[:2])]
    columns = [part.coarse_labels for part in parts if part.coarse_labels is not None]
    if columns and not graded_metrics(task):
        raise UserError("some rows have coarse labels, and others have none; give all theirs")
    classes = np.concatenate([part.labels for part in parts])
    levels = classes, *coarse_levels(itertools.chain(*columns))
    halves = zip(*(np.split(level, [len(queries)]) for level in levels), strict=True)
    return graded_scores(queries, next(halves), gallery, next(halves), **options)


def task_scores(
    task: Task, queries: _Points, gallery: _Points | None, *, metrics: Sequence[str], **options: Any
) -> _Scores:
    """Scores of a task's queries, with the options of `query_scores`.

    With ground truth, there are scores at each level of difficulty, such as "medium/map".
    """
    graded = [name for name in metrics if name in GRADED]
    if task.ground_truth is None:
        metrics, scores = [name for name in metrics if name not in GRADED], {}
        options["own_rows"] = task.own_rows
        if metrics:
            labels = task.gallery.labels if task.gallery else None
            points = queries, task.queries.labels, gallery, labels
            scores = query_scores(*points, metrics=metrics, **options)
        if graded:
            scores |= _graded(task, queries, gallery, metrics=graded, **options)
        return scores
    if graded:
        raise UserError(f"{graded[0]} needs labels of the images, but they have a ground truth")
    by_level = {}
    for level in LEVELS:
        relevance = relevance_at(level, task.ground_truth)
        if not any(map(len, relevance.positives)):  # Possible in a partial copy.
            continue
        with warnings.catch_warnings():
            # The protocol leaves out queries without a positive at a level.
            warnings.filterwarnings("ignore", message=".* queries have no match")
            scores = relevance_scores(queries, gallery, relevance, metrics=metrics, **options)
        by_level |= {f"{level}/{name}": values for name, values in scores.items()}
    return by_level


def findable(ks: Sequence[int], items: int, name: str) -> list[int]:
    """The K that do not exceed the number of images to find; reports the others."""
    check_count(min(ks), items, f"the smallest of {name}")
    if beyond := ", ".join(str(k) for k in ks if k > items):
        console.say(f"no scores at K of {beyond} where a search finds only {items} images")
    return [k for k in ks if k <= items]


def score(
    task: Task[Embeddings], metrics: Sequence[str]
) -> dict[str, dict[str, float | tuple[float, float]]]:
    """The mean of each score, and its 95% bootstrap interval over queries."""
    items, queries = task.gallery.vectors if task.gallery else None, task.queries
    scores = task_scores(task, queries.vectors, items, metrics=metrics, space=queries.space)
    intervals = zip(scores, bootstrap_intervals([*scores.values()]), strict=True)
    return {
        name: {"mean": mean_score(scores[name]), "interval": interval}
        for name, interval in intervals
    }
