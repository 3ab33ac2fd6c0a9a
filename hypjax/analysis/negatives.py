"""The hard negatives of trained runs: their weights in the loss (HypMix, Figures 1 and 3)."""

import itertools
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Int
from matplotlib.figure import Figure

from hypjax.analysis.disk import read_rgb
from hypjax.analysis.hit_grid import Picture, draw_rows, save, shortened
from hypjax.analysis.run_embeddings import Points, head_points, restore_trained, searched
from hypjax.data.dataset import Dataset
from hypjax.data.parts import Splits
from hypjax.errors import UserError, on_one_line
from hypjax.geometry import Space
from hypjax.geometry.learned import learned_scalars
from hypjax.inference.run import Run
from hypjax.objectives import negative_weights, softmax_temperature
from hypjax.runs.tables import aligned
from hypjax.training.setup import training_run

_BLOCK = 64  # Anchors that are compared with all images at once.
_CARRIED = 0.9  # Share of the weight for which the fewest negatives are counted.
_HARDEST = (1, 10, 100)  # Numbers of negatives whose share of the weight is reported.
_POINTS = 200  # Ranks of a curve in a file.
_NAME = 24  # Characters of a class in a table.
_LEAST = 1e-8  # Smallest weight that is drawn, so that the axis shows larger ones in detail.

Weighed = dict[str, Any]  # A run's weights of negatives, see `weigh`.
Runs = Sequence[Weighed]
Mask = Bool[np.ndarray, "anchors items"]


class Choice(NamedTuple):
    """Anchors whose negatives are weighed, among test images or those of a batch."""

    splits: Splits  # Of a batch, its images are the test images.
    anchors: Int[np.ndarray, " anchors"]  # Indices among the test images.
    shown: int  # Number of anchors, the first, whose hardest negatives are listed.
    k: int  # Number of negatives listed of each.
    positives: Int[np.ndarray, " anchors"] | None = None  # In a batch, the positive of each anchor.
    samples_per_class: int = 1  # In a batch, whose adjacent images have one class.

    def negatives(self) -> Int[np.ndarray, " anchors"]:
        """Number of negatives of each anchor."""
        items = searched(self.splits).labels
        if self.positives is not None:
            return np.full(len(self.anchors), 2 * (len(items) // self.samples_per_class - 1))
        return len(items) - _sizes_of_classes(self.splits)[self.anchors]

    def pairs(self, rows: slice) -> tuple[Mask, Mask]:
        """Masks of the positives and negatives of `anchors[rows]` among the searched images.

        In a batch, only images of the anchor's subset and its positive's subset are negatives.
        """
        anchors, items = self.anchors[rows, None], searched(self.splits).labels
        same, index = self.splits.test.labels[anchors] == items, np.arange(len(items))
        if self.positives is None:
            return same & ((index != anchors) | (self.splits.gallery is not None)), ~same
        positives, subset = self.positives[rows, None], index % self.samples_per_class
        in_pair = (subset == subset[anchors]) | (subset == subset[positives])
        return index == positives, ~same & in_pair


def _sizes_of_classes(splits: Splits) -> Int[np.ndarray, " images"]:
    """Number of searched images of each test image's class."""
    labels, items = splits.test.labels, searched(splits).labels
    return np.bincount(items, minlength=labels.max() + 1)[labels]


def choose(splits: Splits, named: Sequence[int], number: int, shown: int, k: int) -> Choice:
    """Chooses evenly spaced test images as anchors, or images by index; each has a positive."""
    anchors = np.flatnonzero(_sizes_of_classes(splits) > (splits.gallery is None))
    return _choose(Choice(splits, anchors, shown, k), named, number)


def choose_in_batch(
    images: Dataset, samples_per_class: int, named: Sequence[int], number: int, shown: int, k: int
) -> Choice:
    """Chooses anchors of a batch, each with every positive.

    Adjacent images have one class. As in the pairwise cross-entropy, the subsets are the first
    images of all classes, the second images, and so on.
    """
    others = samples_per_class - 1
    anchors = np.repeat(np.arange(len(images)), others)
    sample = anchors % samples_per_class
    offset = 1 + np.arange(len(anchors)) % others
    positives = anchors - sample + (sample + offset) % samples_per_class
    splits = Splits(None, None, images, None, "")
    return _choose(Choice(splits, anchors, shown, k, positives, samples_per_class), named, number)


def first_batch(run: Run, size: int) -> tuple[Dataset, int]:
    """The first images of a run's first batch, and the number of images of each class."""
    if run.config.train.unlabelled:
        raise UserError("--batch shows images with labels, but this run was trained without them")
    built = training_run(run)
    samples, most = built.spec.samples_per_class, built.spec.batch_size
    if not 2 * samples <= size <= most:
        raise UserError(f"--batch is {size}; it must be {2 * samples} (two classes) to {most}")
    images = built.plans.choose(0)[: size // samples * samples]
    return built.splits.train.take(images), samples


def _choose(choice: Choice, named: Sequence[int], number: int) -> Choice:
    """Takes `number` evenly spaced anchors, those to show first; or the named anchors."""
    anchors, count = choice.anchors, len(choice.splits.test)
    for index in named:
        if not 0 <= index < count:
            raise UserError(f"--index is {index}; the images are 0 to {count - 1}")
        if index not in anchors:
            raise UserError(f"--index is {index}, an image without another one of its class")
    if not len(anchors):
        raise UserError("no class has two images, so no anchor has a positive")
    if named:
        rows = np.concatenate([np.flatnonzero(anchors == index) for index in named])
        shown = len(rows)
    else:
        rows = _evenly(len(anchors), number)
        first = _evenly(len(rows), choice.shown)
        rows, shown = np.concatenate([rows[first], np.delete(rows, first)]), len(first)
    positives = None if choice.positives is None else choice.positives[rows]
    choice = choice._replace(anchors=anchors[rows], shown=shown, positives=positives)
    if choice.k > (fewest := choice.negatives().min()):
        raise UserError(f"--k is {choice.k}, but an anchor has only {fewest} negatives")
    return choice


def _evenly(count: int, most: int) -> Int[np.ndarray, " chosen"]:
    return np.linspace(0, count - 1, min(most, count)).round().astype(int)


def weigh_run(run: Run, choice: Choice) -> Weighed:
    """Embeds images in the space of the loss, without `eval.pca`, and weighs negatives."""
    params, splits = restore_trained(run), choice.splits
    space = run.trained_objective(params).space
    items = head_points(run, params, space, searched(splits))
    if splits.gallery:
        anchors = head_points(run, params, space, splits.test.take(choice.anchors))
    else:
        anchors = items[choice.anchors]
    temperature = softmax_temperature(run.config, learned_scalars(run.config.objective, params))
    return weigh(run.name, anchors, items, choice, space, temperature)


def weigh(
    name: str, anchors: Points, items: Points, choice: Choice, space: Space, temperature: float
) -> Weighed:
    """Weighs the negatives of anchors by `negative_weights`, in float64.

    Anchors and items are points of the loss's space; the loss divides distances by `temperature`.
    Returns a run of negatives.json. "hardest" lists the nearest negatives of each shown anchor with
    their weights; "weight" is the mean sum of an anchor's weights. "carriers" are the fewest
    negatives that carry 90% of this sum, and "shares" those that the hardest ones have of it.
    "curve" has mean weights at 200 ranks, and their cumulative share.
    """

    @jax.jit
    def compare(points, items, positives, negatives):
        """Distances, infinite to items that are no negatives, and weights."""
        distances = space.distance_matrix(points, items)
        weights = negative_weights(distances, positives, negatives, temperature=temperature)
        return jnp.where(negatives, distances, jnp.inf), weights

    curve, carriers, hardest = np.zeros(len(items)), [], []
    with jax.enable_x64(True):
        doubled = jnp.asarray(items, jnp.float64)
        for start in range(0, len(anchors), _BLOCK):
            block = slice(start, start + _BLOCK)
            points = jnp.asarray(anchors[block], jnp.float64)
            compared = compare(points, doubled, *choice.pairs(block))
            distances, weights = map(np.asarray, compared)
            falling = -np.sort(-weights, axis=1)
            curve += np.sum(falling, axis=0)
            sums = np.cumsum(falling, axis=1)
            carriers += (1 + np.argmax(sums >= _CARRIED * sums[:, -1:], axis=1)).tolist()
            for row, anchor in enumerate(choice.anchors[: choice.shown][block].tolist()):
                hardest.append(_nearest(choice, anchor, distances[row], weights[row]))
    curve = curve[: max(choice.negatives())] / len(anchors)
    weight, cumulative = curve.sum(), np.cumsum(curve) / curve.sum()
    ranks = np.unique(np.geomspace(1, len(curve), _POINTS).round().astype(int))
    drawn = {"rank": ranks, "weight": curve[ranks - 1], "cumulative": cumulative[ranks - 1]}
    quantiles = {f"{q:.0%}": float(np.quantile(carriers, q)) for q in (0.1, 0.5, 0.9)}
    return {
        "run": name,
        "temperature": temperature,
        "weight": float(weight),
        "carriers": {"mean": float(np.mean(carriers)), **quantiles},
        "shares": {n: float(cumulative[min(n, len(cumulative)) - 1]) for n in _HARDEST},
        "carriers_of_anchors": carriers,
        "curve": {name: values.tolist() for name, values in drawn.items()},
        "hardest": hardest,
    }


def _nearest(choice: Choice, anchor: int, distances: np.ndarray, weights: np.ndarray) -> Weighed:
    test, images = choice.splits.test, searched(choice.splits)
    nearest = np.argsort(distances, stable=True)[: choice.k]
    return {
        "index": anchor,
        "name": test.name(anchor),
        "label": test.class_name(anchor),
        "items": nearest.tolist(),
        "classes": [*map(images.class_name, nearest)],
        "distances": distances[nearest].tolist(),
        "weights": weights[nearest].tolist(),
    }


def only_here(runs: Runs, run: int, anchor: int) -> list[bool]:
    """Marks an anchor's hardest negatives in one run that no other run has among its hardest."""
    items = [weighed["hardest"][anchor]["items"] for weighed in runs]
    others = {item for other in (*items[:run], *items[run + 1 :]) for item in other}
    return [len(runs) > 1 and item not in others for item in items[run]]


def summary_table(runs: Runs) -> str:
    """Formats one line per run: weight, negatives that carry 90% of it, shares of the hardest."""
    heads = [f"carry 90%: {name}" for name in runs[0]["carriers"]]
    heads += [f"share of the hardest {n}" for n in runs[0]["shares"]]
    rows = [["run", "", "weight", *heads]]
    for run in runs:
        counts = [f"{value:.1f}" for value in run["carriers"].values()]
        shares = [f"{value:.4f}" for value in run["shares"].values()]
        rows.append([run["run"], "", f"{run['weight']:.4f}", *counts, *shares])
    return aligned(rows)


def anchor_table(runs: Runs, anchor: int) -> str:
    """Returns a shown anchor's hardest negatives in each run; * marks negatives of one run only."""
    shown = runs[0]["hardest"][anchor]
    rows = [["run", "class", "rank", "image", "distance", "weight", " "]]
    for i, run in enumerate(runs):
        columns = (run["hardest"][anchor][x] for x in ("classes", "items", "distances", "weights"))
        negatives = zip(*columns, only_here(runs, i, anchor), strict=True)
        for rank, (label, item, distance, weight, in_one_run) in enumerate(negatives, 1):
            name = shortened(on_one_line(label), _NAME)
            numbers = [str(rank), str(item), f"{distance:.4f}", f"{weight:.5f}", "*" * in_one_run]
            rows.append([run["run"], name, *numbers])
    title = on_one_line(f"anchor {shown['index']} ({shown['name']}), {shown['label']}")
    return f"{title}\n{aligned(rows)}"


def draw_curves(runs: Runs, output: pathlib.Path) -> None:
    """Draws mean weight, and cumulative weight, against the rank of the negative (Figure 3)."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    weight, cumulative = figure.subplots(1, 2)
    for run in runs:
        ranks, mean, share = run["curve"].values()
        weight.plot(ranks, np.where(np.array(mean) >= _LEAST, mean, np.nan), label=run["run"])
        cumulative.plot(ranks, share, label=run["run"])
    cumulative.axhline(_CARRIED, color="grey", linestyle="dashed", linewidth=1)
    weight.set(ylabel="mean weight p(x⁻)", yscale="log")
    ticks = [0, 0.25, 0.5, 0.75, _CARRIED]
    cumulative.set(ylabel="cumulative share of the weight", ylim=(0, 1.02), yticks=ticks)
    for axis in (weight, cumulative):
        axis.set(xlabel="rank of the negative, hardest first", xscale="log")
        axis.grid(alpha=0.3)
    for name in weight.legend().get_texts():
        name.set_parse_math(False)  # Names of folders may hold dollar signs.
    save(figure, output)


def draw_hardest(runs: Runs, splits: Splits, output: pathlib.Path) -> list[pathlib.Path]:
    """Draws each anchor's hardest negatives, one row per run (Figure 1); returns the files."""
    rows, items = [], searched(splits)
    for anchor, i in itertools.product(range(len(runs[0]["hardest"])), range(len(runs))):
        name, shown, only = runs[i]["run"], runs[i]["hardest"][anchor], only_here(runs, i, anchor)
        title = name if i else f"{shown['label']}\n{name}"
        row = [Picture((splits.test, shown["index"]), title, "black")]
        columns = zip(shown["items"], shown["classes"], shown["weights"], only, strict=True)
        for item, label, weight, in_one_run in columns:
            colour = "tab:orange" if in_one_run else "none"
            row.append(Picture((items, item), f"{label}\np {weight:#.3g}", colour))
        rows.append(row)
    return draw_rows(rows, output, lambda image: read_rgb(*image))
