"""Published results on particular objects, to compare a run's own with.

`published_objects.csv` holds what IRT (El-Nouby et al., 2021) reports by mAP on Revisited Oxford
and Paris: Tables 3 (pretrained, and trained without and with differential entropy), 7 (encoders and
dimensions, and convolutional networks of Radenović et al., TPAMI 2019), 9 (pooling), and its table
of λ.
"""

import csv
import functools
import importlib.resources
from collections.abc import Iterator
from typing import NamedTuple

from ml_collections import ConfigDict

from hypjax.config import default_config, irt_objects
from hypjax.config.recipes import names_weights

_CONVOLUTIONAL = {
    "r50": ("resnet50", "resnet50.tv_in1k"),
    "r101": ("resnet101", "resnet101.tv_in1k"),
}


class Row(NamedTuple):
    """One row of a published table, for one dataset.

    Attributes:
        table: Number of the table, or 'lambda'.
        method: What is reported, such as 'irt-r-deit-s pca=128'.
        dim: Dimension of its embeddings.
        dataset: Name of the dataset.
        scores: {"medium": 0.34, "hard": 0.115}, mAP by level.
    """

    table: str
    method: str
    dim: str
    dataset: str
    scores: dict[str, float]


def find(config: ConfigDict, part: str, *, pretrained: bool) -> list[Row]:
    """Rows of a configuration's method, for each table and dataset.

    A configuration matches a row if encoder and weights, views, pixel scaling, pooling, dimension,
    loss, tuples and frozen groups are equal. Batch size, steps and optimiser may differ: the
    comparison shows their effect. The convolutional networks of Table 7 are those that Radenović et
    al. trained; a row of these matches a run with the same architecture, pooling and image size.

    Args:
        config: The run's configuration.
        part: Part of the model; the tables are those of the encoder.
        pretrained: Whether it is scored before training.
    """
    methods = list(_methods(config, part, pretrained))
    return [row for row in rows() if row.method in methods]


def _methods(config: ConfigDict, part: str, pretrained: bool) -> Iterator[str]:
    """What the tables may call a configuration's method."""
    if not _scored_as_published(config, part):
        return
    pca = f" pca={config.eval.pca[part]}" if config.eval.pca[part] else ""
    if pca and config.data.name != "sfm120k":
        return
    model, weight = config.model, config.objective.get("koleo_weight")
    if pretrained:
        if (encoder := _encoder(config)) and model.pooling == "cls":
            yield f"irt-o-{encoder}{pca}"
        return
    if not _trained_as_published(config):
        return
    if encoder := _encoder(config):
        kinds = {0.0: "irt-l", irt_objects.KOLEO_WEIGHTS["irt-r"]: "irt-r"}
        if model.pooling == "cls" and weight in kinds:
            yield f"{kinds[weight]}-{encoder}{pca}"
        if not pca and weight == 0:
            yield f"irt-l-{encoder} pooling={model.pooling}"
        if not pca and model.pooling == "cls":
            yield f"irt-r-{encoder} lambda={float(weight)}"
    for name, (architecture, weights) in _CONVOLUTIONAL.items():
        named = names_weights(weights, model.weights or "")
        if model.architecture == architecture and named and weight == 0:
            yield f"{name}-{model.pooling}-{config.data.image_size}{pca}"


def _encoder(config: ConfigDict) -> str | None:
    """Which of IRT's encoders a configuration starts from."""
    model = config.model
    for name, encoder in irt_objects.ENCODERS.items():
        same = (model.architecture, config.data.image_size) == (
            encoder.architecture,
            encoder.image_size,
        )
        if same and names_weights(encoder.weights, model.weights or ""):
            return name
    return None


def _scored_as_published(config: ConfigDict, part: str) -> bool:
    """Whether squashed images are compared by cosine, as they are or after PCA to 128."""
    ours, recipe, data, model = config.eval, default_config().eval, config.data, config.model
    if part != "encoder":  # Without a head, which is then equal.
        return False
    space = ours.spaces[part][0]
    space = config.objective.space if space == "objective" else space
    rest = all(ours[field] == recipe[field] for field in ("expansion", "rerank", "scales"))
    seen = (data.test_view, data.mean, data.std) == ("squash", irt_objects.MEAN, irt_objects.STD)
    network = model.head == "none" and model.pooling == model.eval_pooling
    whole = not ours.whiten and ours.pca[part] in (None, 128)
    return rest and space == "sphere" and seen and network and whole


def _trained_as_published(config: ConfigDict) -> bool:
    recipe = irt_objects.recipe("irt-r-deit-s")
    ours, data, train = config.objective, config.data, config.train
    views = data.train_view, data.flip, data.resize
    return (
        (data.name, ours.name, ours.space) == ("sfm120k", recipe.objective.name, "sphere")
        and ours.margin == recipe.objective.margin
        and views == (recipe.data.train_view, recipe.data.flip, data.image_size)
        and (train.sampling, train.tuples) == (recipe.train.sampling, recipe.train.tuples)
        and config.optim.frozen == recipe.optim.frozen
        and config.model.drop_path == recipe.model.drop_path
    )


@functools.cache
def rows() -> list[Row]:
    """The rows of all tables."""
    found: dict[tuple[str, ...], Row] = {}
    source = importlib.resources.files("hypjax.runs") / "published_objects.csv"
    with source.open() as file:
        for line in csv.DictReader(file):
            key = line["table"], line["method"], line["dim"], line["dataset"]
            row = found.setdefault(key, Row(*key, {}))
            row.scores[line["level"]] = float(line["value"]) / 100
    return list(found.values())
