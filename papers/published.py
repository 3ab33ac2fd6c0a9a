"""Published results to compare runs with.

`published.csv` holds the papers' scores. Each row names the configuration in `configs/` that
repeats the experiment, and the fields to change; docs/papers.md describes the tables. Encoders are
compared by cosine. Heads are compared in their own space, except HypMix's by cosine and HIER's in
the ball. IRT has three tables: of categories ("irt"), of studies of margin, λ and pooling
("irt-studies"), and of particular objects ("irt-objects").
"""

import csv
import functools
import pathlib
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from hypjax.config import flatten, override, read_config
from hypjax.config.choices import GROUPED
from hypjax.config.reading import PACKAGED
from hypjax.geometry.registry import unused_fields

_TABLES = pathlib.Path(__file__).with_name("published.csv")
_TITLES = {"hyp-vit": "Hyp-ViT", "hypmix": "HypMix", "hier": "HIER"}  # Any other paper is IRT.
# Fields, or groups of fields, in which a run must equal a row's configuration: of any model, and
# of a trained model. Batch size, steps and optimiser may differ: results show their effect.
_EMBEDDING_FIELDS = """data.name data.image_size data.test_view data.mean data.std
    model.architecture model.weights model.pooling model.eval_pooling model.gem_exponent
    model.learn_gem eval.expansion eval.rerank eval.scales eval.pca eval.whiten""".split()
_TRAINING_FIELDS = """data.train_view data.resize data.flip model.head model.head_dim
    model.drop_path optim.frozen train.sampling train.samples_per_class train.tuples
    train.unlabelled objective""".split()
_RATES = {"proxy_rate", "hier_rate"}  # Fields of the objective that may differ.


class Row(NamedTuple):
    """One row of a published table, for one dataset, without the scores."""

    paper: str
    table: str
    method: str
    state: str  # "trained" or "pretrained".
    part: str  # "encoder" or "head".
    dim: str
    dataset: str
    run: str  # Configuration file and variant.
    fields: str  # Fields to change in that run.

    @property
    def name(self) -> str:
        """The row's name in its table, such as 'pretrained DINO, 384-d'."""
        return f"{self.method}, {self.dim}-d"

    def __str__(self) -> str:
        """The row's name with its table, such as 'Hyp-ViT, Table 3, pretrained DINO, 384-d'."""
        table = f"Table {self.table}" if self.table.isdigit() else f"{self.table} table"
        return f"{_TITLES.get(self.paper, 'IRT')}, {table}, {self.name}"


def compare(results: Mapping[str, Any], fields: Mapping[str, Any]) -> str:
    """Lists the published results of a run's experiment, and how the run differs from them.

    A line reads 'published (Hyp-ViT, Table 3, Hyp-DINO, 384-d): R@1 80.9 (ours -0.4), ...', in
    percent and percentage points; '' if nothing comparable was published.
    """
    if results.get("notes"):  # A different experiment, such as one on part of a dataset.
        return ""
    trained = "best" if "best" in results else "final"
    lines: list[str] = []
    for state in ("pretrained", "untrained", trained):
        label = "best" if state == "best" else "ours"
        row_state = "trained" if state == trained else "pretrained"
        for part, scores in results.get(state, {}).items():
            for row in _comparable_rows(fields, part, row_state, scores):
                comparisons = [
                    f"{metric.replace('recall', 'R')} {100 * value:.1f} "
                    f"({label} {round(100 * (scores[metric] - value), 1) + 0.0:+.1f})"  # No -0.0.
                    for metric, value in published_rows()[row].items()
                    if metric in scores
                ]
                lines.append(f"published ({row}): {', '.join(comparisons)}")
    return "\n".join(lines)


def _comparable_rows(
    run_fields: Mapping[str, Any], part: str, state: str, metrics: Collection[str]
) -> list[Row]:
    """Rows of a run's experiment that have any of these metrics."""
    datasets = (run_fields["data.name"], *run_fields["eval.benchmarks"])
    rows = [
        row
        for row, scores in published_rows().items()
        if (row.part, row.state) == (part, state)
        and row.dataset in datasets
        and not scores.keys().isdisjoint(metrics)
        and all(_agrees(row, name, run_fields) for name in _expected_fields(row))
    ]
    # Where "Hyp-ViT batch_size=200" matches, "Hyp-ViT", of another batch size, is left out.
    separator = " batch_size="
    with_batch_size = {row.method.split(separator)[0] for row in rows if separator in row.method}
    return [row for row in rows if row.paper != "hyp-vit" or row.method not in with_batch_size]


def _agrees(row: Row, field: str, run_fields: Mapping[str, Any]) -> bool:
    """Whether a run's field has the value of a row's experiment, or an equivalent value."""
    value: Any = run_fields.get(field)
    expected = _expected_fields(row)[field]
    if field == "model.weights":
        return _names_weights(expected, value or "")
    if field.startswith("eval.spaces"):  # Scores named "head" or "encoder" are of the first space.
        space = value[0]
        if row.paper.startswith("irt") and space == "objective":  # IRT's rows are by cosine.
            space = run_fields["objective.space"]
        return expected[0] == space
    return value == expected


def _names_weights(timm_name: str, location: str) -> bool:
    """Whether `location`, a hub name or a path, refers to the weights of this name in timm."""
    path = pathlib.PurePath(location)
    return (
        location.removeprefix("hf-hub:") in (timm_name, f"timm/{timm_name}")
        or path.name in {f"{timm_name}{suffix}" for suffix in (".safetensors", ".npz", ".pth")}
        or f"models--timm--{timm_name}" in path.parts  # The hub's cache.
    )


@functools.cache
def _expected_fields(row: Row) -> dict[str, Any]:
    """The values of fields that a run must have to be compared with a row."""
    changes = row.fields.split()
    recipe = override(read_config(f"{PACKAGED}/{row.run}"), changes)
    compared = [*_EMBEDDING_FIELDS, f"eval.spaces.{row.part}"]
    compared += [change.partition("=")[0] for change in changes]
    if row.state == "trained":
        compared += _TRAINING_FIELDS
    elif recipe.data.test_view == "centre_crop":
        compared.append("data.resize")
    ignored = {f"objective.{field}" for field in (*_RATES, *unused_fields(recipe.objective))}
    if recipe.train.sampling not in GROUPED:
        ignored.add("train.samples_per_class")
    return {
        field: value
        for field, value in flatten(recipe).items()
        if field not in ignored and any(f"{field}.".startswith(f"{name}.") for name in compared)
    }


@functools.cache
def published_rows() -> dict[Row, dict[str, float]]:
    """All rows in the tables' order, each with scores by metric; recalls are fractions."""
    by_row: dict[Row, dict[str, float]] = {}
    with _TABLES.open(encoding="utf-8") as file:
        for line in csv.DictReader(file):
            scores = by_row.setdefault(Row(*(line[field] for field in Row._fields)), {})
            is_percentage = line["metric"] != "relative_delta"
            scores[line["metric"]] = float(line["value"]) / (100 if is_percentage else 1)
    return by_row
