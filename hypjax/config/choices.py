"""Names that configuration fields accept, beside those of registries.

A new view adds its name here and its code in `hypjax/data/views.py`. A test checks that they agree.
"""

import fnmatch
from collections.abc import Collection

from hypjax.catalogue import PREPARED
from hypjax.objectives.base import GROUPED
from hypjax.retrieval.metrics import AT_K, WITHOUT_K

BENCHMARKS = tuple(name for name, facts in PREPARED.items() if facts.role == "judged")
GIVEN = "own"  # The images that were passed to `hypjax.train`.
# The user's own data: images, features of any model, and what was passed.
USERS = ("folder", "features", GIVEN)
DATASETS = (
    *(name for name, facts in PREPARED.items() if facts.role == "training"),
    *(*USERS, *BENCHMARKS),
)
OWN = "own:"  # Begins the names of the encoders and objectives that were.
HEADS = ("dense", "norm_dense", "none")  # hypjax/models/embedder.py
HEAD_INITS = ("orthogonal", "pca")  # hypjax/models/embedder.py, hypjax/training/head_init.py
PARTS = ("head", "encoder")  # Of a model; hypjax/inference/embedding.py
TRAIN_VIEWS = ("area_crop", "resize_crop")  # hypjax/data/views.py
TEST_VIEWS = ("centre_crop", "squash")  # hypjax/data/views.py
SAMPLINGS = (*GROUPED, "shuffled", "tuples")  # hypjax/data/plans.py
SPLITS_BY = ("classes", "images")  # hypjax/data/parts.py
METRICS = (*AT_K, *WITHOUT_K)
# Parameters with a name, by their path in {"model": ..., "objective": ...}.
GROUPS = {
    "patch_projection": ("model", "encoder", "patch_embed"),
    "encoder": ("model", "encoder"),
    "head": ("model", "head"),
    "space": ("model", "scalars"),
    "objective": ("objective",),
}


def parameter_path(name: str) -> tuple[str, ...]:
    """The path of the parameters that a field names: a key of `GROUPS`, or 'model/head/kernel'."""
    return GROUPS.get(name) or tuple(name.split("/"))


def freezes_encoder(frozen: Collection[str]) -> bool:
    """Whether names in `optim.frozen` hold the whole encoder."""
    encoder, paths = GROUPS["encoder"], map(parameter_path, frozen)
    return any(
        all(map(fnmatch.fnmatchcase, encoder, path)) and path[len(encoder) :] in ((), ("*",))
        for path in paths
    )


def names_parameters(value: object) -> bool:
    """Whether a value is such a name; whether a model has such parameters is known later."""
    return isinstance(value, str) and parameter_path(value)[0] in ("model", "objective")


def in_encoder(name: object) -> bool:
    """Whether a name is that of parameters of the encoder."""
    path = GROUPS["encoder"]
    return names_parameters(name) and parameter_path(name)[: len(path)] == path
