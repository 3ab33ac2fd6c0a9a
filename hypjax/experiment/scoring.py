"""Scores searches among embeddings of any model, such as embeddings in files."""

import collections
import itertools
import pathlib
import warnings
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int

from hypjax import retrieval
from hypjax.data.ground_truth import Benchmark
from hypjax.data.repeats import queries_in_gallery, sharing_files
from hypjax.data.splits import Splits, Task
from hypjax.errors import UserError
from hypjax.galleries.embeddings import Embeddings
from hypjax.galleries.own_images import OwnImages, copies
from hypjax.geometry import Space
from hypjax.retrieval.graded import GRADED
from hypjax.retrieval.inputs import check_count
from hypjax.retrieval.postprocessing import NO_POSTPROCESSING, Postprocessing
from hypjax.system import console
from hypjax.types import GroundTruth, cased_alike, coarse_levels, composed

_Points = Float[np.ndarray, "n d"]
_Scores = dict[str, Float[np.ndarray, " queries"]]  # By metric.


def task_of(
    embeddings: Embeddings,
    queries: Embeddings | None = None,
    benchmark: Benchmark | None = None,
    ground_truth: GroundTruth | None = None,
    *,
    keep_self: bool = False,
) -> Task[Embeddings]:
    """Chooses the queries and the gallery by which embeddings are scored.

    Without `queries`, rows of the split "test" search each other; without this split, rows of the
    split "query" search the split "gallery". Without splits, all rows search each other.
    `ground_truth` describes the splits "query" and "gallery", in order. A query in the gallery does
    not find itself, unless `keep_self`; `hypjax.galleries.own_images` says when an image is the
    query itself.
    """
    if queries is not None:
        if str(queries.space) != str(embeddings.space):
            problem = f"the queries are in {queries.space}, but the gallery in {embeddings.space}"
            raise UserError(f"{problem}; name one --space")
        if len({queries.fingerprint, embeddings.fingerprint} - {""}) > 1:
            raise UserError("queries and gallery were embedded by different models; use one")
    if benchmark is not None:
        if queries is None:
            raise UserError("a ground truth needs --queries")
        queries = queries.take(_rows_of(queries, benchmark.queries, "queries"))
        gallery = embeddings.take(_rows_of(embeddings, benchmark.gallery, "images to search"))
        if unnamed := len(embeddings) - len(gallery):
            console.say(f"{unnamed} images that the ground truth does not name are left out")
        return Task(queries, gallery, benchmark.ground_truth)
    task = Task(queries, embeddings) if queries else _by_splits(embeddings)
    if ground_truth is not None:
        if embeddings.unreadable:
            missing = f"{len(embeddings.unreadable)} of the images with ground truth"
            raise UserError(f"{missing} could not be read; prepare the dataset again")
        return task._replace(ground_truth=ground_truth)
    tables = [*filter(None, (task.queries, task.gallery))]
    if note := cased_alike(itertools.chain(*(images.labels.tolist() for images in tables))):
        console.say(note)
    for images in tables:
        if len(rows := np.flatnonzero(images.labels == "")):
            raise UserError(
                f"the classes of {len(rows)} of {len(images)} rows are unknown, such as row "
                f"{rows[0]}; give classes as the array labels or another that ?label=NAME names, "
                "by --labels, --query_labels or the folders that hypjax.embed embeds, or by "
                "--dataset; or leave these rows out"
            )
    return task if keep_self else _without_own_images(task, one_table=queries is None)


def _without_own_images(task: Task[Embeddings], *, one_table: bool) -> Task[Embeddings]:
    """Excludes queries' own images from their hits, and prints how many queries have own images."""
    queries, gallery = task.queries, task.gallery
    if gallery is None:
        excluded_rows = copies(queries.ids.tolist())
        note = sharing_files(excluded_rows)
    else:
        query_images = queries.ids.tolist(), queries.vectors
        own_images = OwnImages(gallery.ids.tolist(), gallery.vectors)
        excluded_rows = own_images.rows(*query_images, one_table=one_table)
        note = queries_in_gallery(excluded_rows)
    if note:
        console.say(f"{note} (with --keep_self they do)")
    return task._replace(own_rows=excluded_rows)


def require_images(embeddings: Embeddings, splits: Splits) -> None:
    """Raises a `UserError` if embeddings are not of a prepared dataset's images."""
    fingerprints = {splits.images(scored=scored).fingerprint for scored in (False, True)}
    if embeddings.images_fingerprint not in fingerprints:
        raise UserError(
            f"the embeddings are not known to be of this copy of {splits.name}; embed it with "
            "python -m hypjax.embed --dataset, or give a --ground_truth"
        )


def _by_splits(embeddings: Embeddings) -> Task[Embeddings]:
    """Takes queries and gallery by the splits of rows, see `task_of`."""
    if embeddings.splits is None:
        return Task(embeddings)
    present = {*embeddings.splits.tolist()}
    for names in (("test",), ("query", "gallery")):
        if present.issuperset(names):
            tables = [embeddings.take(np.flatnonzero(embeddings.splits == x)) for x in names]
            return Task(tables[0], tables[1] if len(tables) > 1 else None)
    splits = ", ".join(sorted(present - {""}))
    raise UserError(f"the rows have the splits {splits}; they need test, or query and gallery")


def _rows_of(embeddings: Embeddings, names: Sequence[str], noun: str) -> Int[np.ndarray, " names"]:
    """Rows of the images that a ground truth names; all rows, in order, if ids are row numbers."""
    stems = [pathlib.PurePath(composed(name)).stem for name in embeddings.ids.tolist()]
    row_of = {stem: row for row, stem in enumerate(stems)}
    names = list(map(composed, names))
    missing = [name for name in names if name not in row_of]
    if missing and list(row_of) == list(map(str, range(len(names)))):
        return np.arange(len(names))
    if missing:
        raise UserError(
            f"the ground truth has {len(names)} {noun}, such as {missing[0]}, which is not among "
            f"the {len(embeddings)} embeddings; give names as the array ids, or all in order"
        )
    counts = collections.Counter(stems)
    if shared := [name for name in names if counts[name] > 1]:
        problem = f"{counts[shared[0]]} embeddings are of files named {shared[0]}"
        raise UserError(f"{problem}, which a ground truth cannot tell apart; leave out all but one")
    return np.array([row_of[name] for name in names])


def graded_metrics(task: Task) -> list[str]:
    """The graded metrics if all images of a task have coarse labels, else none."""
    columns = [x.coarse_labels for x in (task.queries, task.gallery) if x]
    return [] if any(x is None or "" in x for x in columns) else [*GRADED]


def task_scores(
    task: Task,
    queries: _Points,
    gallery: _Points | None,
    *,
    metrics: Sequence[str],
    space: Space,
    postprocessing: Postprocessing = NO_POSTPROCESSING,
) -> _Scores:
    """Scores of each of a task's queries, by metric; arguments are those of `query_scores`.

    With ground truth, metrics are named by their level of difficulty, as in "medium/map".
    """
    if task.ground_truth is not None:
        return _judged_scores(task.ground_truth, queries, gallery, metrics, space, postprocessing)
    scores: _Scores = {}
    if ungraded := [name for name in metrics if name not in GRADED]:
        scores = retrieval.query_scores(
            queries,
            task.queries.labels,
            gallery,
            task.gallery.labels if task.gallery else None,
            metrics=ungraded,
            space=space,
            postprocessing=postprocessing,
            own_rows=task.own_rows,
        )
    if graded := [name for name in metrics if name in GRADED]:
        levels = _levels(task)
        scores |= retrieval.graded_scores(
            queries,
            [level[: len(queries)] for level in levels],
            gallery,
            None if gallery is None else [level[len(queries) :] for level in levels],
            metrics=graded,
            space=space,
            postprocessing=postprocessing,
            own_rows=task.own_rows,
        )
    return scores


def _levels(task: Task) -> list[np.ndarray]:
    """Labels of queries and then of the gallery: the classes, and any coarse classes."""
    images = [*filter(None, (task.queries, task.gallery))]
    columns = [x.coarse_labels for x in images if x.coarse_labels is not None]
    if columns and not graded_metrics(task):
        raise UserError("some rows have coarse labels and others have none; give them to all rows")
    if not columns:
        console.warn("there are no coarse labels: graded metrics know one level, the classes")
    classes = np.concatenate([x.labels for x in images])
    return [classes, *coarse_levels(itertools.chain(*columns))]


def _judged_scores(
    ground_truth: GroundTruth,
    queries: _Points,
    gallery: _Points | None,
    metrics: Sequence[str],
    space: Space,
    postprocessing: Postprocessing,
) -> _Scores:
    """Scores by ground truth, at each level of difficulty."""
    if graded := [name for name in metrics if name in GRADED]:
        raise UserError(f"{graded[0]} needs labels, but these images have a ground truth instead")
    assert gallery is not None  # Ground truth names queries and a gallery.
    scores: _Scores = {}
    for level in retrieval.LEVELS:
        relevance = retrieval.relevance_at(level, ground_truth)
        if not any(map(len, relevance.positives)):  # Possible in a partial copy of a dataset.
            continue
        with warnings.catch_warnings():
            # The protocol leaves out queries without a positive at a level.
            warnings.filterwarnings("ignore", message=".* queries have no match")
            level_scores = retrieval.relevance_scores(
                queries,
                gallery,
                relevance,
                metrics=metrics,
                space=space,
                postprocessing=postprocessing,
            )
        scores |= {f"{level}/{name}": values for name, values in level_scores.items()}
    return scores


def findable(ks: Sequence[int], num_items: int, setting: str) -> list[int]:
    """The values of K that do not exceed the number of images to find; prints larger values."""
    check_count(min(ks), num_items, f"the smallest of {setting}")
    if beyond := ", ".join(str(k) for k in ks if k > num_items):
        console.say(f"no scores at K of {beyond} where a search finds only {num_items} images")
    return [k for k in ks if k <= num_items]


def score(
    task: Task[Embeddings], metrics: Sequence[str]
) -> dict[str, dict[str, float | tuple[float, float]]]:
    """Mean of each metric over queries, with its 95% bootstrap interval."""
    queries = task.queries
    gallery = task.gallery.vectors if task.gallery else None
    scores = task_scores(task, queries.vectors, gallery, metrics=metrics, space=queries.space)
    intervals = retrieval.bootstrap_intervals([*scores.values()])
    return {
        name: {"mean": retrieval.mean_score(query_scores), "interval": interval}
        for (name, query_scores), interval in zip(scores.items(), intervals, strict=True)
    }
