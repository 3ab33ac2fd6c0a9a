"""What a report shows of a trained run: its searches, classes, confusions and geometry."""

import contextlib
import functools
import json
import pathlib
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Float, Int
from ml_collections import ConfigDict
from PIL import Image

from hypjax.analysis.run_embeddings import head_points, searched
from hypjax.data.dataset import Dataset
from hypjax.data.groupings import Grouping, groupings
from hypjax.data.parts import Splits
from hypjax.data.splits import open_splits
from hypjax.errors import UserError
from hypjax.geometry import Space
from hypjax.geometry.hyperbolicity import curvature_from_delta, relative_delta
from hypjax.inference.embedding import Encodings
from hypjax.inference.weights import restore_best
from hypjax.objectives import create_objective
from hypjax.retrieval import bootstrap_interval, nearest_neighbors
from hypjax.runs.cloud_copy import reading
from hypjax.runs.files import METRICS, RESULTS, TIMES, is_number, read_results
from hypjax.runs.workdir import Workdir, read_warnings, saved_config
from hypjax.system import console

_SAMPLES, _TRIALS = 500, 20  # Points and draws for δ.


class Log(NamedTuple):
    """What a run wrote while it was trained.

    Attributes:
        config: Its configuration.
        results: Its results; None until it is finished.
        lines: Lines of metrics.jsonl.
        times: times.json; empty if there is none.
        warnings: Warnings that it gave.
    """

    config: ConfigDict
    results: dict[str, Any] | None
    lines: list[dict[str, Any]]
    times: dict[str, Any]
    warnings: list[str]


class Search(NamedTuple):
    """The nearest images of a test image.

    Attributes:
        query: Index of the test image.
        hits: Indices of the nearest among the searched images.
        distances: Their distances.
        right: Which of them show the query's class.
    """

    query: int
    hits: list[int]
    distances: list[float]
    right: list[bool]


class ClassRecall(NamedTuple):
    """How often images of a class find one of their class first.

    Attributes:
        name: The class.
        queries: Number of its test images with others of their class.
        recall: Fraction of them whose nearest image is of the class.
        confused: The class that is found most often instead; '' if none is.
        times: How often it is.
    """

    name: str
    queries: int
    recall: float
    confused: str
    times: int


class Inspected(NamedTuple):
    """The embeddings of a run's test images, and what searches among them find.

    Attributes:
        images: What runs of the same images have in common.
        counts: Numbers of images and classes, in words, by part of the dataset.
        points: Points of the test images.
        space: Their space.
        grouping: Name of the grouping for colours, and the groups.
        searches: Of queries that have images of their class: the failures, nearest wrong image
            first, then the successes, farthest first.
        failures: Number of failures.
        interval: Recall@1 with the ends of its 95% interval over queries; None without classes.
        classes: By recall, the lowest first.
        delta: Relative δ of the head's features; NaN for fewer than four images.
        curvature: The c that suits it; NaN if there is none.
        query: Reads a test image.
        hit: Reads a searched image.
        query_name: Class and name of a test image.
        hit_name: Class and name of a searched image.
    """

    images: Hashable
    counts: dict[str, str]
    points: Float[np.ndarray, "n d"]
    space: Space
    grouping: tuple[str, Grouping]
    searches: list[Search]
    failures: int
    interval: tuple[float, float, float] | None
    classes: list[ClassRecall]
    delta: float
    curvature: float
    query: Callable[[int], Image.Image]
    hit: Callable[[int], Image.Image]
    query_name: Callable[[int], tuple[str, str]]
    hit_name: Callable[[int], tuple[str, str]]


def read_log(workdir: str | pathlib.Path) -> Log:
    """Reads what a run wrote while it was trained.

    Raises:
        UserError: The folder holds no run.
    """
    with reading(workdir) as folder:
        config, results = saved_config(folder), read_results(folder / RESULTS)
        lines = _objects(folder / METRICS, str.splitlines, _is_line)
        times = _objects(folder / TIMES, lambda text: [text], _is_time)
        warnings = read_warnings(folder)
    return Log(config, results, lines, times[0] if times else {}, warnings)


def _is_line(values: dict[str, Any]) -> bool:
    """Whether an object is a line of metrics.jsonl: a step, numbers and scores."""
    scored = [values[name] for name in ("validation", "test") if name in values]
    return (
        type(values.get("step")) is int
        and all(map(_holds_numbers, values.values()))
        and all(isinstance(each, dict) and isinstance(each.get("head"), dict) for each in scored)
    )


def _is_time(values: dict[str, Any]) -> bool:
    """Whether an object is that of times.json."""
    return isinstance(values.get("seconds"), dict) and _holds_numbers(values["seconds"])


def _holds_numbers(value: Any) -> bool:
    """Whether a value is a number, or an object of some that hold numbers."""
    if isinstance(value, dict):
        return bool(value) and all(map(_holds_numbers, value.values()))
    return is_number(value)


def _objects(
    path: pathlib.Path,
    split: Callable[[str], Sequence[str]],
    valid: Callable[[dict[str, Any]], bool],
) -> list[dict[str, Any]]:
    """Reads the JSON objects of a file; warns of those that are damaged, and leaves them out."""
    found, texts = [], []
    with contextlib.suppress(OSError):
        texts = split(path.read_text(errors="replace"))
    for text in texts:
        with contextlib.suppress(ValueError, RecursionError):
            found.append(json.loads(text))
    found = [each for each in found if isinstance(each, dict) and valid(each)]
    if len(found) < len(texts):
        console.warn(f"{path} is damaged; {len(texts) - len(found)} of its objects are left out")
    return found


class Opened(NamedTuple):
    """What a run that has just ended still holds.

    Attributes:
        splits: Its images.
        encodings: What it has kept of its frozen encoder's embeddings.
    """

    splits: Splits
    encodings: Encodings | None


def inspect(workdir: str | pathlib.Path, k: int = 8, opened: Opened | None = None) -> Inspected:
    """Embeds the test images with a run's best model, or its last, and searches with each.

    Points are those of the head in the objective's `score_space`, without the projections of
    `eval.pca`.

    Args:
        workdir: Folder or URL of the run.
        k: Number of neighbours of each query.
        opened: What the run still holds, if it has just ended.

    Raises:
        UserError: The folder holds no trained model, the images have changed, or an image cannot be
            read.
    """
    with reading(workdir) as folder:
        config = saved_config(folder)
        model, params = restore_best(folder)
        run = Workdir(folder, config, compared=())
    splits, encodings = opened or (open_splits(config), None)
    run.require({"images": splits.fingerprint})
    space = create_objective(config).score_space
    embed = head_points(config, model, params, space, encodings)
    test, items = splits.test, searched(splits)
    points = embed(test)
    gallery = points if splits.gallery is None else embed(items)
    k = min(k, len(items) - (splits.gallery is None))
    distances, found = nearest_neighbors(
        points, gallery, k=k, space=space, exclude_self=splits.gallery is None
    )
    right = items.labels[found] == test.labels[:, None]
    answerable = _answerable(test, items, splits.gallery is None)
    searches, failures = _ordered(distances, found, right, answerable)
    delta, curvature = _delta(np.asarray(space.features(points)))
    grouped = groupings(config.data.name, test)
    name = list(grouped)[min(1, len(grouped) - 1)]
    parts = {"training": splits.train, "validation": splits.validation, "test": test}
    parts["searched"] = splits.gallery
    return Inspected(
        images=(splits.fingerprint, test.positions.tobytes(), items.positions.tobytes()),
        counts={f"{part} images": each.describe() for part, each in parts.items() if each},
        points=points,
        space=space,
        grouping=(name, grouped[name]),
        searches=searches,
        failures=failures,
        interval=_interval(right[answerable, 0]),
        classes=_classes(test, items, found[:, 0], right[:, 0], answerable),
        delta=delta,
        curvature=curvature,
        query=functools.partial(_image, test),
        hit=functools.partial(_image, items),
        query_name=functools.partial(_name, test),
        hit_name=functools.partial(_name, items),
    )


def _image(images: Dataset, i: int) -> Image.Image:
    return images.image(i, 3).convert("RGB")


def _name(images: Dataset, i: int) -> tuple[str, str]:
    return images.class_name(i), images.name(i)


def _answerable(test: Dataset, items: Dataset, among_itself: bool) -> Bool[np.ndarray, " n"]:
    """Marks the queries with another image of their class, if there are several classes."""
    counts = np.bincount(items.labels, minlength=int(test.labels.max()) + 1)
    if test.num_classes == 1:
        return np.zeros(len(test), bool)
    return counts[test.labels] > among_itself


def _ordered(
    distances: Float[np.ndarray, "n k"],
    found: Int[np.ndarray, "n k"],
    right: Bool[np.ndarray, "n k"],
    answerable: Bool[np.ndarray, " n"],
) -> tuple[list[Search], int]:
    """The searches in the order of a report, and the number of failures."""
    wrong = np.flatnonzero(answerable & ~right[:, 0])
    correct = np.flatnonzero(answerable & right[:, 0])
    wrong = wrong[np.argsort(distances[wrong, 0], kind="stable")]
    correct = correct[np.argsort(-distances[correct, 0], kind="stable")]
    searches = [
        Search(int(i), found[i].tolist(), distances[i].tolist(), right[i].tolist())
        for i in np.concatenate([wrong, correct])
    ]
    return searches, len(wrong)


def _interval(right: Bool[np.ndarray, " n"]) -> tuple[float, float, float] | None:
    if not len(right):
        return None
    return float(right.mean()), *bootstrap_interval(right.astype(np.float64))


def _classes(
    test: Dataset,
    items: Dataset,
    first: Int[np.ndarray, " n"],
    right: Bool[np.ndarray, " n"],
    answerable: Bool[np.ndarray, " n"],
) -> list[ClassRecall]:
    classes = []
    for label in np.unique(test.labels[answerable]):
        own = np.flatnonzero(answerable & (test.labels == label))
        wrong = items.labels[first[own[~right[own]]]]
        confused, times = "", 0
        if len(wrong):
            others, counts = np.unique(wrong, return_counts=True)
            most = int(others[counts.argmax()])
            place = int(first[own[~right[own]]][np.flatnonzero(wrong == most)[0]])
            confused, times = items.class_name(place), int(counts.max())
        name = test.class_name(int(own[0]))
        classes.append(ClassRecall(name, len(own), float(right[own].mean()), confused, times))
    return sorted(classes, key=lambda each: (each.recall, -each.queries, each.name))


def _delta(features: Float[np.ndarray, "n d"]) -> tuple[float, float]:
    try:
        trials = dict(num_samples=_SAMPLES, num_trials=_TRIALS, key=jax.random.key(0))
        delta = float(np.mean(relative_delta(features, **trials)))
        return delta, curvature_from_delta(delta)
    except UserError:  # Too few points, or all are equal.
        return float("nan"), float("nan")
