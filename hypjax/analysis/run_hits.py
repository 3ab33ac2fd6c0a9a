"""Searches among a run's test images: hits, recall by class, and a figure of hits."""

import collections
import pathlib
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, PyTree

from hypjax.analysis.disk import read_rgb
from hypjax.analysis.hit_grid import draw_rows, hit_row
from hypjax.analysis.run_embeddings import head_points, restore_trained, searched
from hypjax.experiment.experiment import Experiment
from hypjax.geometry import Space
from hypjax.retrieval import bootstrap_intervals, nearest_neighbors


class Search(NamedTuple):
    """A test image and its nearest images, nearest first; either may be captions."""

    query: int  # Index of the test image.
    hits: list[int]  # Indices among the searched images.
    distances: list[float]
    right: list[bool]  # Whether each hit has the query's class, or is a pair with it.
    classes: tuple[str, str] = ("", "")  # Class of the query, and of the nearest hit.


class ClassRecall(NamedTuple):
    """Recall@1 of the test images of a class."""

    name: str
    queries: int  # Number of test images of the class that can find another image of the class.
    recall: float
    confused: str  # The wrong class that is most often first; '' if none is.
    times: int  # Number of queries that find the confused class first.


class RunSearches(NamedTuple):
    """The embeddings of a run's test images, and the searches among these images."""

    run: Experiment
    params: PyTree  # Of the run's best or else last model.
    points: Float[np.ndarray, "n d"]
    space: Space
    # Failures with the nearest wrong image first, then successes with the farthest right image
    # first; without queries that cannot find an image of their class.
    searches: list[Search]
    failures: int  # Number of failures: searches whose nearest hit is wrong.
    interval: tuple[float, float, float] | None  # Recall@1, and its 95% interval over queries.
    classes: list[ClassRecall]  # By name.


def search_test_images(run: Experiment, k: int) -> RunSearches:
    """Finds the k nearest images of each test image with a run's best or else last model.

    Images are compared by the head's output in the objective's `score_space`, without `eval.pca`.
    """
    params = restore_trained(run)
    space = run.method.trained_objective(params).score_space
    test, gallery = run.splits.test, searched(run.splits)
    points = head_points(run, params, space, test)
    gallery_points = points if gallery is test else head_points(run, params, space, gallery)
    own_rows = run.splits.own_rows or [[] if run.splits.gallery else [i] for i in range(len(test))]
    most_own = max(map(len, own_rows))  # A query's own images are found, too, but are no hits.
    num_listed = min(k + most_own, len(gallery))
    distances, neighbors = nearest_neighbors(points, gallery_points, k=num_listed, space=space)
    class_sizes = np.bincount(gallery.labels, minlength=int(test.labels.max()) + 1)
    searches = []
    for query, own_hits in enumerate(map(list, own_rows)):
        label = test.labels[query]
        if test.num_classes == 1 or class_sizes[label] == np.sum(gallery.labels[own_hits] == label):
            continue  # The query cannot fail, or has no other image of its class to find.
        columns = np.flatnonzero(~np.isin(neighbors[query], own_hits))[:k]
        hits = neighbors[query, columns].tolist()
        right = (gallery.labels[hits] == label).tolist()
        classes = test.class_name(query), gallery.class_name(hits[0])
        searches.append(Search(query, hits, distances[query, columns].tolist(), right, classes))
    successes = np.array([search.right[0] for search in searches], np.float64)
    failures = int(np.sum(successes == 0))
    interval = (float(successes.mean()), *bootstrap_intervals([successes])[0]) if searches else None
    searches.sort(key=lambda x: (x.right[0], -x.distances[0] if x.right[0] else x.distances[0]))
    recalls = _recall_by_class(searches)
    return RunSearches(run, params, points, space, searches, failures, interval, recalls)


def _recall_by_class(searches: Sequence[Search]) -> list[ClassRecall]:
    hit_classes_of = collections.defaultdict(list)  # Nearest hits' classes, by the query's class.
    for search in searches:
        query_class, hit_class = search.classes
        hit_classes_of[query_class].append(hit_class)
    recalls = []
    for name, hit_classes in sorted(hit_classes_of.items()):
        wrong = collections.Counter(x for x in hit_classes if x != name)
        recall = 1 - wrong.total() / len(hit_classes)
        [(confused, times)] = wrong.most_common(1) or [("", 0)]
        recalls.append(ClassRecall(name, len(hit_classes), recall, confused, times))
    return recalls


def draw_hits(run: Experiment, num_queries: int, k: int, seed: int, output: pathlib.Path) -> str:
    """Draws random test images, of all classes in turn, with their k nearest images.

    Half of the queries, if possible, find an image of another class first. Returns a caption.
    """
    result = search_test_images(run, k)
    test, gallery = run.splits.test, searched(run.splits)
    permutation = np.random.default_rng(seed).permutation(len(result.searches))
    shuffled = [result.searches[i] for i in permutation]
    by_class = in_turn(shuffled, lambda search: (search.right[0], search.classes[0]))
    wrong = [search for search in by_class if not search.right[0]]
    right = [search for search in by_class if search.right[0]]
    wrong, right = half_wrong(wrong, right, num_queries)
    rows = []
    for search in wrong + right:
        hits = []
        for i, distance, is_right in zip(search.hits, search.distances, search.right, strict=True):
            mark = "right" if is_right else "wrong"
            hits.append(((gallery, i), gallery.class_name(i), distance, mark))
        rows.append(hit_row((test, search.query), search.classes[0], hits))
    draw_rows(rows, output, lambda image: read_rgb(*image))
    return (
        "queries that find an image of another class first: "
        f"{result.failures} of {len(result.searches)}; "
        f"drawn: {len(wrong)} of these, then {len(right)} of the others"
    )


def half_wrong(wrong: list[Any], right: list[Any], count: int) -> tuple[list[Any], list[Any]]:
    """Takes `count` items in total: half of each list, more of one if the other is too short."""
    wrong = wrong[: max(count - len(right), count - count // 2)]
    return wrong, right[: count - len(wrong)]


def in_turn(items: Sequence[Any], key: Callable[[Any], Hashable]) -> list[Any]:
    """Sorts items by turns: the first item of each key, then the second of each, and so on."""
    seen: collections.Counter[Hashable] = collections.Counter()
    turns = []
    for item in items:
        turns.append(seen[key(item)])
        seen[key(item)] += 1
    return [items[i] for i in np.argsort(turns, kind="stable")]
