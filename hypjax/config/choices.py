"""Names that configuration fields accept, unless a registry lists them."""

import fnmatch
from collections.abc import Collection, Sequence
from typing import TypeGuard

from hypjax.catalogue import PREPARED
from hypjax.retrieval.graded import GRADED
from hypjax.retrieval.metrics import AT_K, WITHOUT_K

BENCHMARKS = tuple(name for name, facts in PREPARED.items() if facts.role == "judged")
IN_MEMORY = "own"  # Images that `hypjax.train_and_evaluate` receives from Python.
USERS = ("folder", "features", IN_MEMORY)  # The user's own images or features.
_TRAINING = tuple(name for name, facts in PREPARED.items() if facts.role == "training")
DATASETS = (*_TRAINING, *USERS, *BENCHMARKS)
CUSTOM = "own:"  # Prefix of names of user-defined encoders and objectives.
PARTS = ("head", "encoder")  # Parts of a model whose outputs are scored.
# Values of `train.sampling` whose batches hold several images of each class, side by side.
GROUPED = ("epoch_classes", "drawn_classes", "coarse_pairs")
SAMPLINGS = (*GROUPED, "shuffled", "boxes", "tuples")  # hypjax/data/plans.py
# Optimisers (hypjax/training/optim.py), and whether their weight decay is added to the update.
OPTIMIZERS = {"adamw": True, "adam": False, "sgd": False, "muon": True}
METRICS = (*AT_K, *WITHOUT_K, *GRADED)
# Names of groups of parameters, and their paths in {"model": ..., "objective": ...}.
GROUPS = {
    "patch_projection": ("model", "encoder", "patch_embed"),
    "encoder": ("model", "encoder"),
    "head": ("model", "head"),
    "space": ("model", "scalars"),
    "objective": ("objective",),
}


_OTHER_ENCODERS = ("model", "towers_*", "encoder")  # Of towers beside that of images.


def parameter_path(name: str) -> tuple[str, ...]:
    """Returns the path of a group in `GROUPS`, or splits a path such as 'model/head/kernel'."""
    return GROUPS.get(name) or tuple(name.split("/"))


def matches(pattern: Sequence[str], path: Sequence[str]) -> bool:
    """Whether a path begins with names that match a pattern's, such as 'block_*'."""
    return len(pattern) <= len(path) and all(map(fnmatch.fnmatchcase, path, pattern))


def freezes_encoder(frozen: Collection[str]) -> bool:
    """Whether the names in `optim.frozen` freeze the whole encoder."""
    all_parameters = (*GROUPS["encoder"], "*")  # Patterns such as 'block_*' do not match '*'.
    return any(matches(parameter_path(name), all_parameters) for name in frozen)


def is_captioned(objective: str) -> bool:
    """Whether an objective compares images with their captions."""
    return objective == "captions"


def names_parameters(value: object) -> TypeGuard[str]:
    """Whether a value has the form of a parameter's name; the model may lack that parameter."""
    return isinstance(value, str) and parameter_path(value)[0] in ("model", "objective")


def in_encoder(name: object) -> bool:
    """Whether a value names parameters of the encoder."""
    path = GROUPS["encoder"]
    return names_parameters(name) and parameter_path(name)[: len(path)] == path


def in_some_encoder(path: Sequence[str]) -> bool:
    """Whether a path leads to a parameter of the encoder of any tower."""
    return matches(GROUPS["encoder"], path) or matches(_OTHER_ENCODERS, path)


def names_kernels(value: object) -> bool:
    """Whether a value may name kernels that get adapters."""
    return names_parameters(value) and in_some_encoder(parameter_path(value))
