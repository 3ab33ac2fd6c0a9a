"""Hard negatives of trained runs, and their weights in the loss (HypMix, Figures 1 and 3)."""

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
from hypjax.data.splits import Splits
from hypjax.errors import UserError, on_one_line
from hypjax.experiment.experiment import Experiment
from hypjax.geometry import Space
from hypjax.objectives import negative_weights, softmax_temperature
from hypjax.retrieval.inputs import blocks
from hypjax.runs.tables import aligned

_BLOCK = 64  # Anchors that are compared with all images at once.
_CARRIED_SHARE = 0.9  # Share of the weight that the counted hardest negatives carry.
_HARDEST_COUNTS = (1, 10, 100)  # Numbers of negatives whose share of the weight is reported.
_CURVE_POINTS = 200  # Largest number of ranks of a curve in a file.
_NAME_LENGTH = 24  # Characters of a class in a table.
_MIN_WEIGHT = 1e-8  # Smallest weight that is drawn, so that the axis resolves larger weights.

Weights = dict[str, Any]  # The weights of a run's negatives, an item of "runs" in negatives.json.
Mask = Bool[np.ndarray, "anchors items"]


class Choice(NamedTuple):
    """Test images whose negatives are weighed."""

    splits: Splits
    anchors: Int[np.ndarray, " anchors"]  # Indices among the test images.
    num_listed: int  # The first anchors, whose hardest negatives are listed.
    k: int  # Number of hardest negatives listed per anchor.

    def num_negatives(self) -> Int[np.ndarray, " anchors"]:
        """Number of negatives of each anchor."""
        return len(searched(self.splits)) - _class_sizes(self.splits)[self.anchors]

    def pairs(self, rows: slice) -> tuple[Mask, Mask]:
        """Masks of the positives and negatives of `anchors[rows]` among the searched images."""
        anchors, labels = self.anchors[rows, None], searched(self.splits).labels
        same_class = self.splits.test.labels[anchors] == labels
        other_image = (np.arange(len(labels)) != anchors) | (self.splits.gallery is not None)
        return same_class & other_image, ~same_class


def _class_sizes(splits: Splits) -> Int[np.ndarray, " images"]:
    """Number of searched images of each test image's class."""
    labels = splits.test.labels
    return np.bincount(searched(splits).labels, minlength=labels.max() + 1)[labels]


def choose(
    splits: Splits, indices: Sequence[int], num_anchors: int, num_listed: int, k: int
) -> Choice:
    """Chooses test images with a positive as anchors: by index, or evenly spaced.

    The anchors whose negatives are listed come first: all `indices`, or else `num_listed`.
    """
    # An anchor itself may be in the searched images.
    anchors = np.flatnonzero(_class_sizes(splits) > (splits.gallery is None))
    for index in indices:
        if not 0 <= index < len(splits.test):
            raise UserError(f"--index is {index}; the images are 0 to {len(splits.test) - 1}")
        if index not in anchors:
            raise UserError(f"--index is {index}, an image without another image of its class")
    if not len(anchors):
        raise UserError("no class has two images, so no anchor has a positive")
    if indices:
        choice = Choice(splits, np.array(indices), len(indices), k)
    else:
        anchors = anchors[_evenly_spaced(len(anchors), num_anchors)]
        listed = _evenly_spaced(len(anchors), num_listed)
        anchors = np.concatenate([anchors[listed], np.delete(anchors, listed)])
        choice = Choice(splits, anchors, len(listed), k)
    if not choice.num_negatives().min():
        raise UserError("an anchor has no negatives: all images are of its class")
    return choice


def _evenly_spaced(count: int, limit: int) -> Int[np.ndarray, " chosen"]:
    return np.linspace(0, count - 1, min(limit, count)).round().astype(int)


def weigh_run(run: Experiment, choice: Choice) -> Weights:
    """Embeds images in the space of the loss, without `eval.pca`, and weighs negatives."""
    params = restore_trained(run)
    space = run.method.trained_objective(params).space
    images = head_points(run, params, space, searched(choice.splits))
    if choice.splits.gallery:
        anchors = head_points(run, params, space, choice.splits.test.take(choice.anchors))
    else:
        anchors = images[choice.anchors]
    scalars = run.method.learned(params)
    temperature = softmax_temperature(run.method.objective_fields, scalars)
    return weigh(run.name, anchors, images, choice, space, temperature)


def weigh(
    name: str, anchors: Points, images: Points, choice: Choice, space: Space, temperature: float
) -> Weights:
    """Computes the weights that the loss gives to the negatives of anchors, in float64.

    Anchors and images are points of the loss's space; the loss divides distances by `temperature`.

    Returns:
        "weight" is the mean over anchors of the sum of an anchor's weights. "carriers" counts the
        hardest negatives that carry 90% of the sum; "shares" are the shares of the sum that the
        hardest 1, 10 and 100 carry. "curve" has mean weights at up to 200 ranks, and their
        cumulative share. "hardest" lists each listed anchor's nearest positive and k hardest
        negatives.
    """

    @jax.jit
    def compare(points: Points, images: Points, positives: Mask, negatives: Mask) -> Any:
        """Distances, infinite to images that are no negatives; weights; nearest positives."""
        distances = space.distance_matrix(points, images)
        weights = negative_weights(distances, positives, negatives, temperature=temperature)
        nearest = jnp.argmin(jnp.where(positives, distances, jnp.inf), axis=1)
        return jnp.where(negatives, distances, jnp.inf), weights, nearest

    weight_sums = np.zeros(len(images))  # Over anchors, by rank.
    carriers, hardest = [], []
    with jax.enable_x64(True):
        images = images.astype(np.float64)
        for block in blocks(len(anchors), _BLOCK):
            compared = compare(anchors[block].astype(np.float64), images, *choice.pairs(block))
            distances, weights, positives = map(np.asarray, compared)
            descending = -np.sort(-weights, axis=1)
            weight_sums += np.sum(descending, axis=0)
            sums = np.cumsum(descending, axis=1)
            carriers += (1 + np.argmax(sums >= _CARRIED_SHARE * sums[:, -1:], axis=1)).tolist()
            for row, anchor in enumerate(choice.anchors[: choice.num_listed][block].tolist()):
                nearest = _hardest(choice, anchor, distances[row], weights[row])
                hardest.append({**nearest, "positive": int(positives[row])})
    means = weight_sums[: max(choice.num_negatives())] / len(anchors)
    cumulative = np.cumsum(means) / means.sum()
    ranks = np.unique(np.geomspace(1, len(means), _CURVE_POINTS).round().astype(int))
    curve = {"rank": ranks, "weight": means[ranks - 1], "cumulative": cumulative[ranks - 1]}
    quantiles = {f"{q:.0%}": float(np.quantile(carriers, q)) for q in (0.1, 0.5, 0.9)}
    return {
        "run": name,
        "temperature": temperature,
        "weight": float(means.sum()),
        "carriers": {"mean": float(np.mean(carriers)), **quantiles},
        "shares": {n: float(cumulative[min(n, len(cumulative)) - 1]) for n in _HARDEST_COUNTS},
        "carriers_of_anchors": carriers,
        "curve": {column: values.tolist() for column, values in curve.items()},
        "hardest": hardest,
    }


def _hardest(choice: Choice, anchor: int, distances: np.ndarray, weights: np.ndarray) -> Weights:
    """An anchor's k nearest negatives, or all if there are fewer, with distances and weights."""
    test, images = choice.splits.test, searched(choice.splits)
    count = min(choice.k, int(np.isfinite(distances).sum()))  # Other images are infinitely far.
    nearest = np.argsort(distances, stable=True)[:count]
    return {
        "index": anchor,
        "name": test.name(anchor),
        "label": test.class_name(anchor),
        "items": nearest.tolist(),
        "classes": [*map(images.class_name, nearest)],
        "distances": distances[nearest].tolist(),
        "weights": weights[nearest].tolist(),
    }


def only_here(runs: Sequence[Weights], run: int, anchor: int) -> list[bool]:
    """Marks a listed anchor's hardest negatives in one run that no other run lists."""
    images_by_run = [weights["hardest"][anchor]["items"] for weights in runs]
    images = images_by_run.pop(run)
    in_other_runs = set(itertools.chain(*images_by_run))
    return [len(runs) > 1 and image not in in_other_runs for image in images]


def summary_table(runs: Sequence[Weights]) -> str:
    """Formats one line per run: weight, negatives that carry 90% of it, shares of the hardest."""
    heads = [f"carry 90%: {name}" for name in runs[0]["carriers"]]
    heads += [f"share of the hardest {n}" for n in runs[0]["shares"]]
    rows = [["run", "", "weight", *heads]]
    for run in runs:
        counts = [f"{value:.1f}" for value in run["carriers"].values()]
        shares = [f"{value:.4f}" for value in run["shares"].values()]
        rows.append([run["run"], "", f"{run['weight']:.4f}", *counts, *shares])
    return aligned(rows)


def anchor_table(runs: Sequence[Weights], anchor: int) -> str:
    """Formats a listed anchor's hardest negatives in each run; * marks negatives of one run."""
    first = runs[0]["hardest"][anchor]
    rows = [["run", "class", "rank", "image", "distance", "weight", " "]]
    for i, run in enumerate(runs):
        hardest = run["hardest"][anchor]
        columns = (hardest[name] for name in ("classes", "items", "distances", "weights"))
        negatives = zip(*columns, only_here(runs, i, anchor), strict=True)
        for rank, (label, image, distance, weight, in_one_run) in enumerate(negatives, 1):
            name = shortened(on_one_line(label), _NAME_LENGTH)
            numbers = [str(rank), str(image), f"{distance:.4f}", f"{weight:.5f}", "*" * in_one_run]
            rows.append([run["run"], name, *numbers])
    title = on_one_line(f"anchor {first['index']} ({first['name']}), {first['label']}")
    return f"{title}\n{aligned(rows)}"


def draw_curves(runs: Sequence[Weights], output: pathlib.Path) -> None:
    """Draws mean weight, and cumulative weight, against the rank of the negative (Figure 3)."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    weight, cumulative = figure.subplots(1, 2)
    for run in runs:
        ranks, means, shares = run["curve"].values()
        drawn_means = np.where(np.array(means) >= _MIN_WEIGHT, means, np.nan)
        weight.plot(ranks, drawn_means, label=run["run"])
        cumulative.plot(ranks, shares, label=run["run"])
    cumulative.axhline(_CARRIED_SHARE, color="grey", linestyle="dashed", linewidth=1)
    weight.set(ylabel="mean weight p(x⁻)", yscale="log")
    ticks = [0, 0.25, 0.5, 0.75, _CARRIED_SHARE]
    cumulative.set(ylabel="cumulative share of the weight", ylim=(0, 1.02), yticks=ticks)
    for axis in (weight, cumulative):
        axis.set(xlabel="rank of the negative, hardest first", xscale="log")
        axis.grid(alpha=0.3)
    for name in weight.legend().get_texts():
        name.set_parse_math(False)  # Names of folders may hold dollar signs.
    save(figure, output)


def draw_hardest(
    runs: Sequence[Weights], splits: Splits, output: pathlib.Path
) -> list[pathlib.Path]:
    """Draws each listed anchor, its nearest positive and its hardest negatives (Figure 1).

    Each run has a row. Returns the files.
    """
    rows = []
    for anchor, i in itertools.product(range(len(runs[0]["hardest"])), range(len(runs))):
        name, hardest = runs[i]["run"], runs[i]["hardest"][anchor]
        title = name if i else f"{hardest['label']}\n{name}"
        row = [Picture((splits.test, hardest["index"]), title, "black")]
        row.append(
            Picture((searched(splits), hardest["positive"]), "nearest positive", "tab:green")
        )
        columns = hardest["items"], hardest["classes"], hardest["weights"]
        negatives = zip(*columns, only_here(runs, i, anchor), strict=True)
        for image, label, weight, in_one_run in negatives:
            colour = "tab:orange" if in_one_run else "none"
            row.append(Picture((searched(splits), image), f"{label}\np {weight:#.3g}", colour))
        rows.append(row)
    return draw_rows(rows, output, lambda image: read_rgb(*image))
