"""Published results, to compare a run's own with.

`published.csv` holds what papers report for the methods in `hypjax.config.recipes`. A method is
named like the variant that trains it, and by the fields that it changes.

- Hyp-ViT (Ermolov et al., CVPR 2022): Tables 1 (δ-hyperbolicity), 2 (heads), 3 (encoders), 4
  (patches of 8×8 pixels) and 5 (ablations). Heads are compared in their space, encoders by cosine.
  The "default" of Table 5 differs from Tables 2 and 3 by 0.1 and is left out.
- HypMix (Yue et al., WACV 2024): Tables 1 (heads, by cosine) and 2 (encoders), with its own runs of
  the methods of Hyp-ViT. On the sphere it divides the cosine by 0.05, so our temperature is 0.1.
- HIER (Kim et al., CVPR 2023): its table of HIER, and of its own runs of Hyp-ViT's loss, with heads
  of 384 coordinates (ResNet-50: 512), compared in the ball.
- IRT (El-Nouby et al., 2021): Tables 2 (embeddings of 384 coordinates, and of 128 by PCA) and 3
  (without training, and without differential entropy), and as "irt-studies" Tables 6 (margin and λ)
  and 9 (pooling). The settings of its study of objectives are not known beyond the contrastive
  loss, which is `irt-l`.
- As "irt-objects", what IRT reports by mAP on Revisited Oxford and Paris: Tables 3, 7 (encoders and
  dimensions, and convolutional networks of Radenović et al., TPAMI 2019), 9 (pooling), and its
  table of λ.
"""

import csv
import functools
import importlib.resources
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from hypjax.config import flatten, hier, irt, irt_objects
from hypjax.config.recipes import MIX_WEIGHTS, SHORTER_SIDES, Variant, hyp_vit, names_weights
from hypjax.objectives import unused_fields
from hypjax.objectives.base import GROUPED

_TITLES = {"hyp-vit": "Hyp-ViT", "hypmix": "HypMix", "hier": "HIER"}  # Of papers; the rest is IRT.
_SPELLED = {
    "hyp": "Hyp",
    "sph": "Sph",
    "mix": "HypMix",
    "hier": "HIER",
    "irt": "IRT",
    **{kind: kind.upper() for kind in "olr"},  # Of IRT.
    "vit": "ViT",
    "deit": "DeiT",
    "dino": "DINO",
    "resnet50": "ResNet50",
    **{size: size.upper() for size in ("s", "b", "r50", "r101")},
    "gem": "GeM",
    "rmac": "R-MAC",
}
_CONVOLUTIONAL = {"r50": "resnet50", "r101": "resnet101"}
_CHANGES = {  # Fields by their names in methods.
    "batch_size": ["train.batch_size"],
    "c": ["objective.c"],
    "head_dim": ["model.head_dim"],
    "lambda": ["objective.koleo_weight"],
    "margin": ["objective.margin"],
    "pca": ["eval.pca.encoder"],
    "pooling": ["model.pooling", "model.eval_pooling"],
    "temperature": ["objective.temperature"],
}
# Fields in which a run and the recipe of a method are equal, besides the space: of every paper;
# then of each one, whether it is trained or not; and if it is. Batch size, steps and optimiser may
# differ: the comparison shows their effect.
_EMBEDDING = """data.image_size data.test_view data.mean data.std model.architecture model.weights
    model.pooling model.eval_pooling eval.expansion eval.rerank eval.scales"""
_HYP_VIT = "data.resize data.train_view eval.pca", "model.head model.head_dim optim.frozen"
_IRT = (
    "data.resize model.head eval.whiten eval.pca.encoder",
    "data.train_view data.flip train.sampling train.samples_per_class model.drop_path optim.frozen",
)
_FIELDS = {
    "hyp-vit": _HYP_VIT,
    "hypmix": _HYP_VIT,
    "hier": (_HYP_VIT[0], f"{_HYP_VIT[1]} train.sampling"),
    "irt": _IRT,
    "irt-studies": _IRT,
    # Images are squashed, so that `data.resize` is only that of training.
    "irt-objects": (
        "model.head eval.whiten eval.pca.encoder",
        f"{_IRT[1]} data.name data.resize train.tuples",
    ),
}
_RATES = {"proxy_rate", "hier_rate"}  # They may differ, too.


class _Row(NamedTuple):
    """One row of a published table, for one dataset; its scores are not part of it."""

    paper: str
    table: str
    method: str
    part: str
    dim: str
    dataset: str

    @property
    def pretrained(self) -> bool:
        """Whether the row reports an encoder before training; some of these name no loss."""
        return self.method.startswith(("pretrained-", "irt-o-")) or "-" not in self.method


def published_delta(config: ConfigDict) -> float | None:
    """Returns the relative δ that Hyp-ViT's Table 1 reports for the encoder on its training images.

    It belongs to the same encoder, weights, views and pixel scaling.
    """
    rows = (_scores()[row] for row in _find(config, "encoder", pretrained=True))
    return next((scores["relative_delta"] for scores in rows if "relative_delta" in scores), None)


def show(results: Mapping[str, Any], config: ConfigDict) -> None:
    """Prints the lines of `compare`, if there are any.

    Results with notes, for example from a partial copy of a dataset, are not compared: they come
    from a different experiment.
    """
    if not results.get("notes") and (lines := compare(results, config)):
        print(lines)


def compare(results: Mapping[str, Any], config: ConfigDict) -> str:
    """Returns the published results that a run can be compared with, and the differences.

    A line reads 'published (Hyp-ViT, Table 3, Hyp-DINO, 384-d): R@1 80.9 (ours -0.4), ...', in
    percent and percentage points. The trained model is the best one if validation classes chose
    it, else the last.

    Args:
        results: {"final": {"head": {"recall@1": 0.7, ...}, "encoder": ...}, ...}, or
            {"pretrained": {"encoder": ...}}.
        config: The run's configuration.

    Returns:
        The lines, without a final newline; '' if nothing comparable was published.
    """
    trained = "best" if "best" in results else "final"
    lines = []
    for state in ("pretrained", "untrained", trained):
        whose = "best" if state == "best" else "ours"
        for part, ours in results.get(state, {}).items():
            for row in _find(config, part, pretrained=state != trained):
                if differences := list(_differences(_scores()[row], ours, whose)):
                    lines.append(f"published ({_place(row)}): {', '.join(differences)}")
    return "\n".join(lines)


def _place(row: _Row) -> str:
    """'Hyp-ViT, Table 3, pretrained DINO, 384-d'."""
    table = f"Table {row.table}" if row.table.isdigit() else f"{row.table} table"
    name, _, change = row.method.partition(" ")
    spelled = "-".join(_SPELLED.get(word, word) for word in name.split("-"))
    method = f"{spelled} {change}".strip().replace("pretrained-", "pretrained ")
    whose = " (Radenovic et al.)" if name.partition("-")[0] in _CONVOLUTIONAL else ""
    return f"{_TITLES.get(row.paper, 'IRT')}, {table}, {method}{whose}, {row.dim}-d"


def _differences(
    published: Mapping[str, float], ours: Mapping[str, float], whose: str
) -> Iterator[str]:
    """Yields each score that both have, as published, with our difference, in ASCII."""
    for name, value in published.items():
        if name in ours:
            points = round(100 * (ours[name] - value), 1) + 0.0  # Turns -0.0 into 0.0.
            yield f"{name.replace('recall', 'R')} {100 * value:.1f} ({whose} {points:+.1f})"


def _find(config: ConfigDict, part: str, *, pretrained: bool) -> list[_Row]:
    """The rows whose recipe is a run's. A row for its batch size replaces that for any."""
    ours = flatten(config)
    found = [
        row
        for row in _scores()
        if (row.part, row.pretrained) == (part, pretrained)
        and (row.dataset == config.data.name or row.paper == "irt-objects")
        and all(_equal(row, field, ours, value) for field, value in _expected(row).items())
    ]
    methods = {row.method.partition(" batch_size=")[::2] for row in found}
    of_batches = {method for method, batch in methods if batch}
    return [r for r in found if r.paper != "hyp-vit" or r.method not in of_batches]


def _equal(row: _Row, field: str, ours: Mapping[str, Any], value: Any) -> bool:
    own = ours.get(field)
    if field == "model.weights":
        return names_weights(value, own or "")
    if field.startswith("eval.spaces"):
        by_cosine = row.paper.startswith("irt") and own[0] == "objective"
        return value[0] == (ours["objective.space"] if by_cosine else own[0])
    return own == value


@functools.cache
def _expected(row: _Row) -> dict[str, Any]:
    """The fields that make a row's method, with their values."""
    recipe = _recipe(row)
    always, trained = _FIELDS[row.paper]
    paths = f"{_EMBEDDING} {always} eval.spaces.{row.part}"
    paths = (paths if row.pretrained else f"{paths} {trained} objective").split()
    ignored = {f"objective.{field}" for field in _RATES}
    if row.paper not in ("irt", "irt-studies"):
        ignored |= {f"objective.{field}" for field in unused_fields(recipe.objective)}
    if recipe.train.sampling not in GROUPED:
        ignored.add("train.samples_per_class")
    if "relative_delta" in _scores()[row]:  # However embeddings are compared.
        paths = [path for path in paths if not path.startswith("eval.") or path == "eval.scales"]
    values = flatten(recipe)
    for change in row.method.split()[1:]:
        name, _, value = change.partition("=")
        for field in _CHANGES[name]:
            values[field] = value if name == "pooling" else float(value)
            paths.append(field)
    return {
        field: value
        for field, value in values.items()
        if field not in ignored and any(f"{field}.".startswith(f"{path}.") for path in paths)
    }


def _recipe(row: _Row) -> ConfigDict:
    """The configuration that trains a row's method, but for what the method changes."""
    method = row.method.partition(" ")[0]
    name, _, rest = method.partition("-")
    if name in _CONVOLUTIONAL:
        config = irt_objects.recipe("irt-l-deit-s")
        config.model.architecture = _CONVOLUTIONAL[name]
        config.model.weights = f"{_CONVOLUTIONAL[name]}.tv_in1k"
        pooling, _, size = rest.partition("-")
        config.model.pooling = config.model.eval_pooling = pooling
        config.data.image_size = config.data.resize = int(size)
        return config
    if row.paper == "irt-objects":
        return irt_objects.recipe(method)
    space, encoder = ("hyp", rest or name) if row.pretrained else (name, rest)
    if row.paper.startswith("irt"):  # 'irt-r-deit', or 'irt-deit' in the study of margin and λ.
        space, encoder = (method[:5], method[6:]) if rest != "deit" else ("irt-r", rest)
    variant = Variant(method, space, encoder, released=False)
    config = hyp_vit(variant)
    config.data.name = row.dataset
    config.data.resize = SHORTER_SIDES.get(row.dataset, config.data.resize)
    if space == "mix":
        config.objective.ball_weight = MIX_WEIGHTS[row.dataset]
    if row.paper == "hier":
        hier.use(config, variant)
    elif row.paper.startswith("irt"):
        irt.use(config, variant)
    return config


@functools.cache
def _scores() -> dict[_Row, dict[str, float]]:
    """The scores of all rows, as fractions, in the tables' order."""
    found: dict[_Row, dict[str, float]] = {}
    with (importlib.resources.files("hypjax.runs") / "published.csv").open() as file:
        for line in csv.DictReader(file):
            scores = found.setdefault(_Row(*(line[field] for field in _Row._fields)), {})
            percent = line["metric"] != "relative_delta"
            scores[line["metric"]] = float(line["value"]) / (100 if percent else 1)
    return found
