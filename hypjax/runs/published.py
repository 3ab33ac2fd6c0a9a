"""Published results, to compare a run with.

`published.csv` holds the papers' scores, each with the run of `configs/` that repeats it and the
fields to change. docs/papers.md describes the tables. Heads are compared in their space, and
encoders by cosine; HypMix's heads by cosine, HIER's in the ball. IRT's rows are of categories
("irt"), of studies of margin, λ and pooling ("irt-studies"), and of particular objects
("irt-objects").
"""

import csv
import functools
import importlib.resources
import pathlib
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from hypjax.config import flatten, override, read_config
from hypjax.config.reading import PACKAGED
from hypjax.geometry.registry import unused_fields
from hypjax.objectives.base import GROUPED

_TITLES = {"hyp-vit": "Hyp-ViT", "hypmix": "HypMix", "hier": "HIER"}  # The rest is IRT.
# Fields that must equal the recipe's: for all rows, and for trained ones. Batch size, steps and
# optimiser may differ: the comparison shows their effect.
_EMBEDDING = """data.name data.image_size data.test_view data.mean data.std model.architecture
    model.weights model.pooling model.eval_pooling model.gem_exponent model.learn_gem eval.expansion
    eval.rerank eval.scales eval.pca eval.whiten"""
_TRAINING = """data.train_view data.resize data.flip model.head model.head_dim model.drop_path
    optim.frozen train.sampling train.samples_per_class train.tuples train.unlabelled objective"""
_RATES = {"proxy_rate", "hier_rate"}  # They may differ, too.


class Row(NamedTuple):
    """One row of a published table, for one dataset, without its scores."""

    paper: str
    table: str
    method: str
    state: str  # Trained, or pretrained.
    part: str
    dim: str
    dataset: str
    run: str  # Configuration file and variant.
    fields: str  # Fields to change in that run.

    @property
    def name(self) -> str:
        """Names the row in its table, as in 'pretrained DINO, 384-d'."""
        return f"{self.method}, {self.dim}-d"

    def __str__(self) -> str:
        """Names the row with its table, as in 'Hyp-ViT, Table 3, pretrained DINO, 384-d'."""
        table = f"Table {self.table}" if self.table.isdigit() else f"{self.table} table"
        return f"{_TITLES.get(self.paper, 'IRT')}, {table}, {self.name}"


def published_delta(config: ConfigDict) -> float | None:
    """The relative δ that Hyp-ViT's Table 1 reports for the encoder on its training images."""
    rows = _find(config, "encoder", "pretrained", ["relative_delta"])
    return next((published_rows()[row]["relative_delta"] for row in rows), None)


def compare(results: Mapping[str, Any], config: ConfigDict) -> str:
    """Lists the published results that a run's can be compared with, and the differences.

    A line reads 'published (Hyp-ViT, Table 3, Hyp-DINO, 384-d): R@1 80.9 (ours -0.4), ...', in
    percent and percentage points; '' if nothing comparable was published.
    """
    if results.get("notes"):  # As from a partial copy of a dataset: a different experiment.
        return ""
    trained = "best" if "best" in results else "final"
    lines = []
    for state in ("pretrained", "untrained", trained):
        whose = "best" if state == "best" else "ours"
        for part, ours in results.get(state, {}).items():
            for row in _find(config, part, "trained" if state == trained else "pretrained", ours):
                differences = [
                    f"{name.replace('recall', 'R')} {100 * value:.1f} "
                    f"({whose} {round(100 * (ours[name] - value), 1) + 0.0:+.1f})"  # No -0.0.
                    for name, value in published_rows()[row].items()
                    if name in ours
                ]
                lines.append(f"published ({row}): {', '.join(differences)}")
    return "\n".join(lines)


def _find(config: ConfigDict, part: str, state: str, names: Collection[str]) -> list[Row]:
    """The rows with any of these scores and the run's recipe, and best its batch size."""
    ours = flatten(config)
    rows = [
        row
        for row, scores in published_rows().items()
        if (row.part, row.state) == (part, state)
        and row.dataset in (config.data.name, *config.eval.benchmarks)
        and not scores.keys().isdisjoint(names)
        and all(_equal(row, field, ours, value) for field, value in _expected(row).items())
    ]
    methods = {row.method.partition(" batch_size=")[::2] for row in rows}
    with_batch_size = {method for method, batch_size in methods if batch_size}
    return [r for r in rows if r.paper != "hyp-vit" or r.method not in with_batch_size]


def _equal(row: Row, field: str, ours: Mapping[str, Any], value: Any) -> bool:
    our_value = ours.get(field)
    if field == "model.weights":
        return _names_weights(value, our_value or "")
    if field.startswith("eval.spaces"):
        by_cosine = row.paper.startswith("irt") and our_value[0] == "objective"
        return value[0] == (ours["objective.space"] if by_cosine else our_value[0])
    return our_value == value


def _names_weights(weights: str, location: str) -> bool:
    """Whether a hub name or a file path, `model.weights`, names these weights of timm."""
    path = pathlib.PurePath(location)
    files = {weights + suffix for suffix in (".safetensors", ".npz", ".pth")}
    named = location.removeprefix("hf-hub:") in (weights, f"timm/{weights}") or path.name in files
    return named or f"models--timm--{weights}" in path.parts  # The hub's cache.


@functools.cache
def _expected(row: Row) -> dict[str, Any]:
    changes = row.fields.split()
    recipe = override(read_config(f"{PACKAGED}/{row.run}"), changes)
    paths = f"{_EMBEDDING} eval.spaces.{row.part}".split()
    if row.state == "trained":
        paths += _TRAINING.split()
    elif recipe.data.test_view != "squash":
        paths.append("data.resize")
    ignored = {f"objective.{field}" for field in (*_RATES, *unused_fields(recipe.objective))}
    if recipe.train.sampling not in GROUPED:
        ignored.add("train.samples_per_class")
    if "relative_delta" in published_rows()[row]:  # However embeddings are compared.
        paths = [path for path in paths if not path.startswith("eval.") or path == "eval.scales"]
    paths += [change.partition("=")[0] for change in changes]
    return {
        field: value
        for field, value in flatten(recipe).items()
        if field not in ignored and any(f"{field}.".startswith(f"{path}.") for path in paths)
    }


@functools.cache
def published_rows() -> dict[Row, dict[str, float]]:
    """The scores of all rows, as fractions, in the tables' order."""
    by_row: dict[Row, dict[str, float]] = {}
    with (importlib.resources.files("hypjax.runs") / "published.csv").open() as file:
        for line in csv.DictReader(file):
            scores = by_row.setdefault(Row(*(line[field] for field in Row._fields)), {})
            percent = line["metric"] != "relative_delta"
            scores[line["metric"]] = float(line["value"]) / (100 if percent else 1)
    return by_row
