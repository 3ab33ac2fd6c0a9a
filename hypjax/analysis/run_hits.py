"""Searches among a run's test images: their hits, recall by class, and a figure of some."""

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
from hypjax.retrieval import bootstrap_interval, nearest_neighbors


class Search(NamedTuple):
    """The nearest images of a test image."""

    query: int  # Index of the test image.
    hits: list[int]  # Indices among the searched images.
    distances: list[float]
    right: list[bool]  # Which hits show the query's class.
    classes: tuple[str, str]  # Of the query, and of its nearest image.


class ClassRecall(NamedTuple):
    """How often images of a class find one of their class first."""

    name: str
    queries: int  # Number of its test images with others of their class.
    recall: float
    confused: str  # The class that is most often first instead; '' if none is.
    times: int  # Number of queries that find the confused class first.


class RunSearches(NamedTuple):
    """The embeddings of a run's test images, and searches among them."""

    run: Run
    points: Float[np.ndarray, "n d"]
    space: Space
    # Queries with images of their class: failures, nearest wrong image first, then successes,
    # farthest first.
    searches: list[Search]
    failures: int
    interval: tuple[float, float, float] | None  # Recall@1, and its 95% interval over queries.
    classes: list[ClassRecall]  # By name.


def search_test_images(run: Run, k: int) -> RunSearches:
    """Finds k neighbours of each test image by a run's best model, or its last.

    Points are the head's in the objective's `score_space`, without `eval.pca`.
    """
    params = restore_trained(run)
    space = run.trained_objective(params).score_space
    test, items = run.splits.test, searched(run.splits)
    one_table = run.splits.gallery is None
    points = head_points(run, params, space, test)
    gallery = points if one_table else head_points(run, params, space, items)
    own_rows = run.splits.own_rows or [[i] if one_table else [] for i in range(len(test))]
    most_own = max(map(len, own_rows))
    k = min(k, len(items) - most_own)
    distances, hits = nearest_neighbors(points, gallery, k=k + most_own, space=space)
    counts = np.bincount(items.labels, minlength=int(test.labels.max()) + 1)
    searches = []
    for i, own in enumerate(own_rows if test.num_classes > 1 else ()):
        label, own = test.labels[i], [*own]
        if counts[label] == np.sum(items.labels[own] == label):
            continue  # No other image of its class can be found.
        others = np.flatnonzero(~np.isin(hits[i], own))[:k]
        right = items.labels[hits[i, others]] == label
        names = test.class_name(i), items.class_name(hits[i, others[0]])
        columns = (x.tolist() for x in (hits[i, others], distances[i, others], right))
        searches.append(Search(i, *columns, names))
    first = np.array([search.right[0] for search in searches], np.float64)
    interval = (float(first.mean()), *bootstrap_interval(first)) if len(first) else None
    searches.sort(key=lambda x: (x.right[0], -x.distances[0] if x.right[0] else x.distances[0]))
    failures = int(np.sum(first == 0))
    return RunSearches(run, points, space, searches, failures, interval, _classes(searches))


def _classes(searches: Sequence[Search]) -> list[ClassRecall]:
    hits_of = collections.defaultdict(list)
    for search in searches:
        query, hit = search.classes
        hits_of[query].append("" if search.right[0] else hit)
    classes = []
    for name, hits in sorted(hits_of.items()):
        wrong = collections.Counter(filter(None, hits))
        recall = 1 - wrong.total() / len(hits)
        (confused,) = wrong.most_common(1) or [("", 0)]
        classes.append(ClassRecall(name, len(hits), recall, *confused))
    return classes


def draw_hits(workdir: str, queries: int, k: int, seed: int, output: pathlib.Path) -> str:
    """Draws random test images with their k nearest images, classes in turn; returns a caption.

    Half of the queries, if that many exist, find an image of another class first.
    """
    (run,) = open_runs([workdir])
    result = search_test_images(run, k)
    test, items = run.splits.test, searched(run.splits)
    shuffled = np.random.default_rng(seed).permutation(len(result.searches)).tolist()
    order = in_turn(shuffled, lambda i: (i < result.failures, result.searches[i].classes[0]))
    wrong = [result.searches[i] for i in order if i < result.failures]
    right = [result.searches[i] for i in order if i >= result.failures]
    wrong, right = half_wrong(wrong, right, queries)
    rows = []
    for search in wrong + right:
        columns = zip(search.hits, search.distances, search.right, strict=True)
        hits = [
            ((items, i), items.class_name(i), distance, "right" if is_right else "wrong")
            for i, distance, is_right in columns
        ]
        rows.append(hit_row((test, search.query), search.classes[0], hits))
    draw_rows(rows, output, lambda image: read_rgb(*image))
    drawn = f"drawn: {len(wrong)} of these, then {len(right)} of the others"
    count = f"{result.failures} of {len(result.searches)}"
    return f"queries that find an image of another class first: {count}; {drawn}"


def half_wrong(wrong: list[Any], right: list[Any], most: int) -> tuple[list[Any], list[Any]]:
    """Takes the first failures and successes, half of each where there are enough."""
    wrong = wrong[: max(most - len(right), most - most // 2)]
    return wrong, right[: most - len(wrong)]


def in_turn(items: Sequence[Any], key: Callable[[Any], Hashable]) -> list[Any]:
    """The items in their order, but the first of each key before any second one."""
    seen: collections.Counter[Hashable] = collections.Counter()
    turns = []
    for item in items:
        turns.append(seen[key(item)])
        seen[key(item)] += 1
    return [items[i] for i in np.argsort(turns, kind="stable")]
