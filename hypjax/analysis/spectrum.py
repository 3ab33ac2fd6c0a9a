"""The spread of embeddings before and after training (IRT, Analysis)."""

import functools
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from matplotlib.figure import Figure

from hypjax.analysis.disk import COLOURS
from hypjax.analysis.hit_grid import save
from hypjax.analysis.run_embeddings import head_points, restore_trained, untrained_parameters
from hypjax.data.dataset import Dataset
from hypjax.experiment.experiment import Experiment
from hypjax.geometry import Space
from hypjax.objectives.comparisons import similarity
from hypjax.retrieval import projection
from hypjax.runs.tables import aligned

_BINS = 100
_SHARES = (0.9, 0.99)  # Shares of the variance for which components are counted.
_STATES = ("untrained", "trained")
# Kinds of pairs, with colours that colour-blind readers can tell apart.
_PAIRS = {
    "one_class": ("same class", COLOURS[0]),
    "different_classes": ("different classes", COLOURS[1]),
}


def spectrum_of_run(run: Experiment, images: Dataset) -> dict[str, Any]:
    """Measures the spread of embeddings before training, and of a run's best or else last model.

    Images are compared by the head's output in the objective's `score_space`, without `eval.pca`.
    """
    spread: dict[str, Any] = {"run": run.name}
    models = untrained_parameters(run), restore_trained(run)
    for state, params in zip(_STATES, models, strict=True):
        space = run.method.trained_objective(params).score_space
        points = head_points(run, params, space, images)
        spread[state] = measure_spread(points, images.labels, space)
    return spread


def measure_spread(points: np.ndarray, labels: np.ndarray, space: Space) -> dict[str, Any]:
    """Measures principal components of the features of points, and similarities of all pairs.

    Similarity is 1 − distance / 2, the cosine on the sphere. Its histograms have equal intervals;
    their overlap is the common area of same-class and different-class pairs. Points [images, dim]
    need labels [images] of two classes, one of them with two images. Points that are all equal
    raise a `UserError`.
    """
    dim = min(space.features(points[:1]).shape[-1], len(points))
    variances = projection.fit(points, space=space, dim=dim).variances
    energy = np.cumsum(variances) / np.sum(variances)
    compare = jax.jit(lambda x: similarity(space.distance_matrix(x, x)))
    similarities = np.asarray(compare(points), np.float64)
    pairs = np.tri(len(points), k=-1, dtype=bool)  # Each pair once.
    same_class = labels[:, None] == labels
    edges = np.linspace(similarities[pairs].min(), similarities[pairs].max(), _BINS + 1)
    by_kind = [similarities[pairs & mask] for mask in (same_class, ~same_class)]
    counts = np.stack([np.histogram(values, edges)[0] for values in by_kind])
    shares = counts / counts.sum(axis=1, keepdims=True)
    return {
        "cumulative_energy": energy.tolist(),
        "components": {f"{share:.0%}": int(np.sum(energy < share)) + 1 for share in _SHARES},
        "similarity": {
            "edges": edges.tolist(),
            **{f"pairs_of_{kind}": n.tolist() for kind, n in zip(_PAIRS, counts, strict=True)},
            **{f"mean_of_{kind}": float(x.mean()) for kind, x in zip(_PAIRS, by_kind, strict=True)},
            "overlap": float(np.minimum(*shares).sum()),
        },
    }


def table(runs: Sequence[Mapping[str, Any]]) -> str:
    """Formats a table with two lines per run, before and after training."""
    heads = ["run", "state", *(f"components for {share:.0%}" for share in _SHARES)]
    rows = [[*heads, "mean similarity: same class", "other classes", "overlap"]]
    names = ("mean_of_one_class", "mean_of_different_classes", "overlap")
    for run in runs:
        for state in _STATES:
            components = [str(count) for count in run[state]["components"].values()]
            similarities = [f"{run[state]['similarity'][name]:.4f}" for name in names]
            rows.append([run["run"], state, *components, *similarities])
    return aligned(rows)


def draw(runs: Sequence[Mapping[str, Any]], output: pathlib.Path) -> None:
    """Draws the cumulative energy of all runs, and each run's histograms of similarity."""
    columns = min(1 + len(runs), 3)
    rows = math.ceil((1 + len(runs)) / columns)
    figure = Figure(figsize=(4.4 * columns, 3.6 * rows), layout="constrained")
    energy, *histograms = figure.subplots(rows, columns, squeeze=False).ravel()
    for i, (run, axes) in enumerate(zip(runs, histograms, strict=False)):
        for state, line, outline in (("untrained", "--", ":"), ("trained", "-", "-")):
            is_trained = state == "trained"
            shares, similarities = run[state]["cumulative_energy"], run[state]["similarity"]
            label = run["run"] if is_trained else None
            energy.plot(np.arange(1, len(shares) + 1), shares, line, color=f"C{i}", label=label)
            alpha = 0.5 if is_trained else 1.0
            stairs = functools.partial(axes.stairs, fill=is_trained, alpha=alpha, linestyle=outline)
            for kind, (name, colour) in _PAIRS.items():
                counts = np.array(similarities[f"pairs_of_{kind}"])
                label = name if is_trained else f"{name}, untrained"
                stairs(counts / counts.sum(), similarities["edges"], color=colour, label=label)
        axes.set(xlabel="similarity (1 − distance / 2)", ylabel="share of the pairs", yticks=[])
        axes.set_title(run["run"], fontsize=10, parse_math=False)
    energy.plot([], [], color="grey", linestyle="dashed", label="untrained")
    energy.set(xscale="log", xlabel="principal components")
    energy.set(ylim=(0, 1.02), ylabel="cumulative share of the variance")
    energy.grid(alpha=0.3)
    for name in energy.legend(fontsize=8).get_texts():
        name.set_parse_math(False)  # Names of folders may hold dollar signs.
    for axes in histograms[len(runs) :]:
        axes.set_axis_off()
    entries = histograms[0].get_legend_handles_labels()
    figure.legend(*entries, loc="outside lower center", ncols=4, frameon=False)
    save(figure, output)
