"""Searches among a run's test images: hits, recall by class, and a figure of hits."""

import collections
import pathlib
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from hypjax.analysis.disk import read_rgb
from hypjax.analysis.hit_grid import draw_rows, hit_row
from hypjax.analysis.run_embeddings import head_points, open_runs, restore_trained, searched
from hypjax.geometry import Space
from hypjax.inference.run import Run
from hypjax.retrieval import bootstrap_intervals, nearest_neighbors


class Search(NamedTuple):
    """A test image and its nearest images, nearest first."""

    query: int  # Index of the test image.
    hits: list[int]  # Indices among the searched images.
    distances: list[float]
    right: list[bool]  # Whether each hit has the query's class.
    classes: tuple[str, str]  # Class of the query, and of the nearest hit.


class ClassRecall(NamedTuple):
    """Recall@1 of the test images of a class."""

    name: str
    queries: int  # Number of test images of the class that can find another image of the class.
    recall: float
    confused: str  # The wrong class that is most often first; '' if none is.
    times: int  # Number of queries that find the confused class first.


class RunSearches(NamedTuple):
    """The embeddings of a run's test images, and the searches among these images."""

    run: Run
    points: Float[np.ndarray, "n d"]
    space: Space
    # Failures with the nearest wrong image first, then successes with the farthest right image
    # first; without queries that cannot find an image of their class.
    searches: list[Search]
    failures: int  # Number of failures: searches whose nearest hit is wrong.
    interval: tuple[float, float, float] | None  # Recall@1, and its 95% interval over queries.
    classes: list[ClassRecall]  # By name.


def search_test_images(run: Run, k: int) -> RunSearches:
    """Finds the k nearest images of each test image with a run's best or else last model.

    Images are compared by the head's output in the objective's `score_space`, without `eval.pca`.
    """
    params = restore_trained(run)
    space = run.trained_objective(params).score_space
    test, gallery = run.splits.test, searched(run.splits)
    one_table = run.splits.gallery is None
    points = head_points(run, params, space, test)
    gallery_points = points if one_table else head_points(run, params, space, gallery)
    own_rows = run.splits.own_rows or [[i] if one_table else [] for i in range(len(test))]
    most_own = max(map(len, own_rows))
    k = min(k, len(gallery) - most_own)
    distances, hits = nearest_neighbors(points, gallery_points, k=k + most_own, space=space)
    class_sizes = np.bincount(gallery.labels, minlength=int(test.labels.max()) + 1)
    searches = []
    for i, own in enumerate(own_rows if test.num_classes > 1 else ()):
        label, own = test.labels[i], [*own]
        if class_sizes[label] == np.sum(gallery.labels[own] == label):
            continue  # The gallery has no other image of the query's class.
        columns = np.flatnonzero(~np.isin(hits[i], own))[:k]
        nearest = hits[i, columns]
        right = gallery.labels[nearest] == label
        classes = test.class_name(i), gallery.class_name(nearest[0])
        hit_distances = distances[i, columns].tolist()
        searches.append(Search(i, nearest.tolist(), hit_distances, right.tolist(), classes))
    first = np.array([search.right[0] for search in searches], np.float64)
    interval = (float(first.mean()), *bootstrap_intervals([first])[0]) if len(first) else None
    searches.sort(key=lambda x: (x.right[0], -x.distances[0] if x.right[0] else x.distances[0]))
    failures = int(np.sum(first == 0))
    classes = _recall_by_class(searches)
    return RunSearches(run, points, space, searches, failures, interval, classes)


def _recall_by_class(searches: Sequence[Search]) -> list[ClassRecall]:
    first_hits = collections.defaultdict(list)  # Classes of nearest hits, by class of the query.
    for search in searches:
        query_class, hit_class = search.classes
        first_hits[query_class].append(hit_class)
    recalls = []
    for name, hit_classes in sorted(first_hits.items()):
        wrong = collections.Counter(x for x in hit_classes if x != name)
        recall = 1 - wrong.total() / len(hit_classes)
        (confused,) = wrong.most_common(1) or [("", 0)]
        recalls.append(ClassRecall(name, len(hit_classes), recall, *confused))
    return recalls


def draw_hits(workdir: str, num_queries: int, k: int, seed: int, output: pathlib.Path) -> str:
    """Draws random test images, of all classes in turn, with their k nearest images.

    Half of the queries, if that many exist, find an image of another class first. Returns a
    caption.
    """
    (run,) = open_runs([workdir])
    result = search_test_images(run, k)
    test, gallery = run.splits.test, searched(run.splits)
    shuffled = np.random.default_rng(seed).permutation(len(result.searches)).tolist()
    order = in_turn(shuffled, lambda i: (i < result.failures, result.searches[i].classes[0]))
    wrong = [result.searches[i] for i in order if i < result.failures]
    right = [result.searches[i] for i in order if i >= result.failures]
    wrong, right = half_wrong(wrong, right, num_queries)
    rows = []
    for search in wrong + right:
        columns = zip(search.hits, search.distances, search.right, strict=True)
        hits = [
            ((gallery, i), gallery.class_name(i), distance, "right" if is_right else "wrong")
            for i, distance, is_right in columns
        ]
        rows.append(hit_row((test, search.query), search.classes[0], hits))
    draw_rows(rows, output, lambda image: read_rgb(*image))
    drawn = f"drawn: {len(wrong)} of these, then {len(right)} of the others"
    count = f"{result.failures} of {len(result.searches)}"
    return f"queries that find an image of another class first: {count}; {drawn}"


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
