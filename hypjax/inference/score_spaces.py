"""What evaluation scores: the parts of a model, each in spaces of its choice."""

from ml_collections import ConfigDict

from hypjax.config.choices import PARTS
from hypjax.geometry import Space
from hypjax.objectives import create_objective
from hypjax.objectives.create import create_space


def scored_spaces(config: ConfigDict) -> dict[str, Space]:
    """The spaces in which `eval.spaces` compares the embeddings.

    By default the head is compared in the objective's space, the encoder by cosine (Hyp-ViT,
    Section 4.2).

    Args:
        config: The run's configuration.

    Returns:
        {"head": ..., "encoder": ...} with the first space of each part, and its further spaces
        under names such as "head:sphere".
    """
    spaces = {}
    for part in PARTS:
        for i, name in enumerate(config.eval.spaces[part]):
            spaces[f"{part}:{name}" if i else part] = _space(config, name)
    return spaces


def part_of(name: str) -> str:
    """The part of the model behind a name of `scored_spaces`."""
    return name.partition(":")[0]


def _space(config: ConfigDict, name: str) -> Space:
    if name == "objective":
        return create_objective(config).score_space
    return create_space(ConfigDict({**config.objective, "space": name}))
