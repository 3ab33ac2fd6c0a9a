"""Published results, to compare a run's own with.

`published.csv` holds what papers report for the methods in `hypjax.config.recipes`.

- Hyp-ViT (Ermolov et al., CVPR 2022): Tables 1 (δ-hyperbolicity), 2 (heads), 3 (encoders), 4
  (patches of 8×8 pixels) and 5 (ablations). Heads are compared in their space, encoders by cosine.
  The "default" of Table 5 differs from Tables 2 and 3 by 0.1 and is not used.
- HypMix (Yue et al., WACV 2024): Tables 1 (heads, by cosine) and 2 (encoders), with its own runs of
  the methods of Hyp-ViT. On the sphere it divides the cosine by 0.05, so our temperature is 0.1.
- HIER (Kim et al., CVPR 2023): its table of HIER, and of its own runs of Hyp-ViT's loss, with heads
  of 384 coordinates (ResNet-50: 512), compared in the ball.
- IRT (El-Nouby et al., 2021): Tables 2 (embeddings of 384 coordinates, and of 128 by PCA) and 3
  (without training, and without differential entropy), and as "irt-studies" Tables 6 (margin and λ)
  and 9 (pooling). The settings of its study of objectives are not known beyond the contrastive
  loss, which is `irt-l`. Its tables of particular objects are in `published_objects`.
"""

import csv
import functools
import importlib.resources
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from hypjax.config import default_config, hier, irt
from hypjax.config.recipes import (
    ENCODERS,
    KOLEO_WEIGHTS,
    MIX_WEIGHTS,
    SHORTER_SIDES,
    SPACES,
    Variant,
    hyp_vit,
    names_weights,
)
from hypjax.objectives.base import GROUPED
from hypjax.runs import published_objects

_TITLES = {  # Short titles of papers.
    "hyp-vit": "Hyp-ViT",
    "hypmix": "HypMix",
    "hier": "HIER",
    "irt": "IRT",
    "irt-studies": "IRT",
}
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
_ENCODER_DIM = 384


class PublishedRow(NamedTuple):
    """One row of a published table, for one dataset.

    Attributes:
        paper: The paper.
        table: Number of the table, or 'main'.
        scores: {"recall@1": 0.809, ...}, in the table's order.
    """

    paper: str
    table: str
    scores: dict[str, float]


def published_scores(
    config: ConfigDict, part: str, *, pretrained: bool = False
) -> dict[str, float] | None:
    """Returns what a paper reports for a configuration's method on its dataset.

    A configuration matches a row if dataset, encoder and weights, views, pixel scaling, pooling,
    spaces, temperature, dimension and frozen groups are equal. Batch size, steps and optimiser may
    differ: the comparison shows their effect. If Table 5 has a row for the same batch size, that
    row is used. For HIER, all fields of the objective but its rates, and the sampling, are equal.

    Args:
        config: The run's configuration.
        part: Part of the model: 'head' or 'encoder'.
        pretrained: Whether to return the scores before training instead of after it.

    Returns:
        {"recall@1": 0.809, ...} as fractions, from the first paper with such a row, or None.
    """
    found = _find(config, part, pretrained)
    return found[0][1].scores if found else None


def published_delta(config: ConfigDict) -> float | None:
    """Returns the relative δ that Table 1 reports for the encoder on its training images."""
    encoder = _encoder(config)
    row = encoder and _rows().get(("hyp-vit", config.data.name, "encoder", encoder))
    return row.scores["relative_delta"] if row else None


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
        for part, ours in results.get(state, {}).items():
            dim = _ENCODER_DIM if part == "encoder" else config.model.head_dim
            dim = config.eval.pca.get(part) or dim
            whose = "best" if state == "best" else "ours"
            for method, (paper, table, scores) in _find(config, part, pretrained=state != trained):
                if differences := list(_differences(scores, ours, whose)):
                    place = f"{_TITLES[paper]}, {_numbered(table)}, {_spell(method)}, {dim}-d"
                    lines.append(f"published ({place}): {', '.join(differences)}")
            lines += _compare_objects(config, part, ours, pretrained=state != trained, whose=whose)
    return "\n".join(lines)


def _compare_objects(
    config: ConfigDict, part: str, ours: Mapping[str, float], *, pretrained: bool, whose: str
) -> Iterator[str]:
    """Yields the lines of scores on judged datasets."""
    for row in published_objects.find(config, part, pretrained=pretrained):
        published = {f"{row.dataset}/{level}/map": value for level, value in row.scores.items()}
        if differences := list(_differences(published, ours, whose)):
            whose_method = "" if row.method.startswith("irt") else " (Radenovic et al.)"
            method = _spell(row.method) + whose_method
            place = f"{_TITLES['irt']}, {_numbered(row.table)}, {method}, {row.dim}-d"
            yield f"published ({place}): {', '.join(differences)}"


def _numbered(table: str) -> str:
    return f"Table {table}" if table.isdigit() else f"{table} table"


def _differences(
    published: Mapping[str, float], ours: Mapping[str, float], whose: str
) -> Iterator[str]:
    """Yields each score that both have, as published, with our difference.

    The text is ASCII, which every terminal can print.
    """
    for name, value in published.items():
        if name in ours:
            points = round(100 * (ours[name] - value), 1) + 0.0  # Turns -0.0 into 0.0.
            yield f"{name.replace('recall', 'R')} {100 * value:.1f} ({whose} {points:+.1f})"


def _spell(method: str) -> str:
    """'Hyp-DINO' for 'hyp-dino', 'pretrained DINO' for 'pretrained-dino'."""
    name, _, change = method.partition(" ")
    spelled = "-".join(_SPELLED.get(word, word) for word in name.split("-"))
    return f"{spelled} {change}".strip().replace("pretrained-", "pretrained ")


def _find(config: ConfigDict, part: str, pretrained: bool) -> list[tuple[str, PublishedRow]]:
    """Returns a configuration's method as the tables name it, and its row, for each paper."""
    found: dict[str, tuple[str, PublishedRow]] = {}
    known = _methods(config, pretrained) if _scored_as_published(config, part) else {}
    for paper, methods in (known | _methods_of_irt(config, part, pretrained)).items():
        for method in methods:
            row = _rows().get((paper, config.data.name, part, method))
            if row is not None:
                found.setdefault(paper, (method, row))
    return list(found.values())


def _methods(config: ConfigDict, pretrained: bool) -> dict[str, list[str]]:
    """Returns what a configuration's method may be called in the tables of each paper."""
    encoder = _encoder(config)
    if pretrained:
        methods = [f"pretrained-{encoder}"]
    else:
        methods = _trained_methods(config, encoder) if encoder else []
    found = {"hyp-vit": methods, "hypmix": methods}
    return found if pretrained else found | {"hier": _methods_of_hier(config)}


def _methods_of_hier(config: ConfigDict) -> list[str]:
    """Returns the method's name in HIER's table, if the recipe differs in nothing that matters."""
    encoder = _encoder(config, shorter_side=hier.SHORTER_SIDE)
    if encoder is None or config.data.name not in hier.SCHEDULES:
        return []
    for name in ("hier", "hyp"):
        variant = Variant(f"{name}-{encoder}", name, encoder, released=False)
        recipe = hyp_vit(variant)
        recipe.data.name = config.data.name
        hier.use(recipe, variant)
        if _method_fields(config) == _method_fields(recipe):
            return [variant.name]
    return []


def _methods_of_irt(config: ConfigDict, part: str, pretrained: bool) -> dict[str, list[str]]:
    """Returns the method's names in IRT's tables, if the recipe differs in nothing that matters.

    Margin, λ and pooling may differ, since there are tables of these.
    """
    if config.data.name not in irt.SCHEDULES or not _scored_as_irt(config, part):
        return {}
    objective, model = config.objective, config.model
    for encoder in irt.ENCODERS:
        recipe = hyp_vit(Variant("", "irt-r", encoder, released=False))
        recipe.data.name = config.data.name
        irt.use(recipe, Variant("", "irt-r", encoder, released=False))
        recipe.objective.margin = objective.get("margin", 0)
        recipe.objective.koleo_weight = objective.get("koleo_weight", 0)
        recipe.model.pooling = recipe.model.eval_pooling = model.pooling
        same = _irt_fields(config, pretrained) == _irt_fields(recipe, pretrained)
        if same and names_weights(recipe.model.weights, model.weights or ""):
            return _names_in_irt(config, encoder, part, pretrained)
    return {}


def _names_in_irt(
    config: ConfigDict, encoder: str, part: str, pretrained: bool
) -> dict[str, list[str]]:
    """Names of a run that follows IRT but for margin, λ and pooling."""
    objective, pooling = config.objective, config.model.pooling
    pca = f" pca={config.eval.pca[part]}" if config.eval.pca[part] else ""
    if pretrained:
        return {"irt": [f"irt-o-{encoder}{pca}"] if pooling == "cls" else []}
    margin, weight = objective.margin, objective.koleo_weight
    kinds = {(0.5, weight): kind for kind, weight in KOLEO_WEIGHTS.items()}
    kind = kinds.get((margin, weight))
    found = {"irt": [f"{kind}-{encoder}{pca}"] if pooling == "cls" and kind else []}
    if pca:
        return found
    studies = [f"irt-l-{encoder} pooling={pooling}"] if kind == "irt-l" else []
    if pooling == "cls":
        studies.append(f"irt-{encoder} margin={float(margin)} lambda={float(weight)}")
    return found | {"irt-studies": studies}


def _scored_as_irt(config: ConfigDict, part: str) -> bool:
    """Whether a part is compared by cosine, as it is or after PCA to 128 coordinates."""
    ours, recipe = config.eval, default_config().eval
    if part not in recipe.spaces:  # A further space of a part.
        return False
    space = ours.spaces[part][0]
    space = config.objective.space if space == "objective" else space
    rest = all(ours[field] == recipe[field] for field in ("expansion", "rerank", "scales"))
    return rest and space == "sphere" and not ours.whiten and ours.pca[part] in (None, 128)


def _irt_fields(config: ConfigDict, pretrained: bool) -> tuple[Any, ...]:
    """The fields that make a method of IRT's tables, apart from the weights."""
    data, model, train = config.data, config.model, config.train
    shown = [data[name] for name in ("image_size", "resize", "test_view", "mean", "std")]
    network = model.architecture, model.pooling, model.eval_pooling, model.head
    if pretrained:
        return shown, network
    views = data.train_view, data.flip
    sampling = train.sampling, train.sampling in GROUPED and train.samples_per_class
    trained = model.drop_path, config.optim.frozen
    return shown, network, config.objective, views, sampling, trained


def _method_fields(config: ConfigDict) -> tuple[Any, ...]:
    """The fields that make a method of HIER's table, apart from encoder and views."""
    rates = ("proxy_rate", "hier_rate")  # Like all of the optimiser's settings, they may differ.
    objective = {field: value for field, value in config.objective.items() if field not in rates}
    model, sampling = config.model, config.train.sampling
    return objective, model.head, model.head_dim, config.optim.frozen, sampling


def _scored_as_published(config: ConfigDict, part: str) -> bool:
    """Whether a part is compared in the published space, as the model embeds it."""
    ours, recipe = config.eval, default_config().eval
    spaces = {part: of_part[0] for part, of_part in recipe.spaces.items()}
    if config.objective.name == "hypmix":
        spaces["head"] = "sphere"
    if part not in spaces or ours.spaces[part][0] != spaces[part]:
        return False
    return all(ours[field] == recipe[field] for field in ("pca", "expansion", "rerank"))


def _encoder(config: ConfigDict, shorter_side: int | None = None) -> str | None:
    """Returns which of `ENCODERS` a configuration starts from, or None.

    Args:
        config: The run's configuration.
        shorter_side: Shorter side of the published test view; by default that of Hyp-ViT.
    """
    data, model = config.data, config.model
    recipe = default_config()
    recipe.data.resize = shorter_side or SHORTER_SIDES.get(data.name, recipe.data.resize)
    fields = ("image_size", "resize", "train_view", "test_view")
    views = all(data[field] == recipe.data[field] for field in fields)
    if not views or config.eval.scales != recipe.eval.scales:
        return None
    if not model.weights:
        return None
    actual = model.architecture, model.pooling, model.eval_pooling, data.mean, data.std
    for name, encoder in ENCODERS.items():
        pooling = encoder.pooling, encoder.eval_pooling
        expected = encoder.architecture, *pooling, encoder.mean, encoder.std
        if actual == expected and names_weights(encoder.weights, model.weights):
            return name
    return None


def _trained_methods(config: ConfigDict, encoder: str) -> list[str]:
    """Returns the tables' names for a configuration's training, the most specific one first."""
    objective, recipe = config.objective, default_config()
    published = _published_objective(config)
    if published is None:
        return []
    if (config.optim.frozen, config.model.head) != (recipe.optim.frozen, recipe.model.head):
        return []
    name, fields = published
    method = f"{name}-{encoder}"
    changes = [
        f"{field}={objective[field]}" for field in fields if objective[field] != fields[field]
    ]
    if config.model.head_dim != recipe.model.head_dim:
        changes.append(f"head_dim={config.model.head_dim}")
    if not changes:
        return [f"{method} batch_size={config.train.batch_size}", method]
    return [f"{method} {changes[0]}"] if len(changes) == 1 else []


def _published_objective(config: ConfigDict) -> tuple[str, dict[str, float]] | None:
    """Returns the objective's name in the tables, and its fields as published."""
    objective, recipe = config.objective, default_config().objective
    if objective.name == "hypmix":
        mixed = default_config("hypmix").objective
        fields = {field: mixed[field] for field in mixed if field not in ("name", "space")}
        return "mix", fields | {"ball_weight": MIX_WEIGHTS.get(config.data.name)}
    prefixes = {space: prefix for prefix, space in SPACES.items()}
    if objective.name != recipe.name or objective.space not in prefixes:
        return None
    fields = {"temperature": recipe.temperature}
    if objective.space == "poincare":  # The sphere has neither field.
        fields |= {"c": recipe.c, "clip_radius": recipe.clip_radius}
    return prefixes[objective.space], fields


@functools.cache
def _rows() -> dict[tuple[str, str, str, str], PublishedRow]:
    """The rows of all tables by paper, dataset, part of the model, and method."""
    rows: dict[tuple[str, str, str, str], PublishedRow] = {}
    with (importlib.resources.files("hypjax.runs") / "published.csv").open() as file:
        for line in csv.DictReader(file):
            of_encoder = line["dim"] == str(_ENCODER_DIM) and line["paper"] != "hier"
            of_encoder |= line["paper"].startswith("irt")  # Without a head.
            part = "encoder" if of_encoder else "head"
            key = line["paper"], line["dataset"], part, line["method"]
            row = rows.setdefault(key, PublishedRow(line["paper"], line["table"], {}))
            percent = line["metric"] != "relative_delta"
            row.scores[line["metric"]] = float(line["value"]) / (100 if percent else 1)
    return rows
