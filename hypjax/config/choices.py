"""Names that configuration fields accept, where no registry lists them."""

import fnmatch
from collections.abc import Collection

from hypjax.catalogue import PREPARED
from hypjax.data import views
from hypjax.objectives.base import GROUPED
from hypjax.retrieval.graded import GRADED
from hypjax.retrieval.metrics import AT_K, WITHOUT_K

BENCHMARKS = tuple(name for name, facts in PREPARED.items() if facts.role == "judged")
IN_MEMORY = "own"  # Images from Python, see `hypjax.train_and_evaluate`.
# The user's own data: images, features of any model, and images in memory.
USERS = ("folder", "features", IN_MEMORY)
DATASETS = (
    *(name for name, facts in PREPARED.items() if facts.role == "training"),
    *USERS,
    *BENCHMARKS,
)
CUSTOM = "own:"  # Prefix of the names of users' encoders and objectives.
HEADS = ("dense", "norm_dense", "none")  # hypjax/models/embedder.py
HEAD_INITS = ("orthogonal", "pca")  # hypjax/models/embedder.py, hypjax/training/head_init.py
PARTS = ("head", "encoder")  # Outputs of a model.
TRAIN_VIEWS, TEST_VIEWS = tuple(views.TRAIN_VIEWS), tuple(views.TEST_VIEWS)
SAMPLINGS = (*GROUPED, "shuffled", "tuples")  # hypjax/data/plans.py
SPLITS_BY = ("classes", "images")  # hypjax/data/parts.py
METRICS = (*AT_K, *WITHOUT_K, *GRADED)
# Named groups of parameters, by their path in {"model": ..., "objective": ...}.
GROUPS = {
    "patch_projection": ("model", "encoder", "patch_embed"),
    "encoder": ("model", "encoder"),
    "head": ("model", "head"),
    "space": ("model", "scalars"),
    "objective": ("objective",),
}


def parameter_path(name: str) -> tuple[str, ...]:
    """Path of the parameters that a name stands for: of `GROUPS`, or as 'model/head/kernel'."""
    return GROUPS.get(name) or tuple(name.split("/"))


def freezes_encoder(frozen: Collection[str]) -> bool:
    """Whether names in `optim.frozen` freeze the whole encoder."""
    encoder = GROUPS["encoder"]
    return any(
        all(map(fnmatch.fnmatchcase, encoder, path)) and path[len(encoder) :] in ((), ("*",))
        for path in map(parameter_path, frozen)
    )


def names_parameters(value: object) -> bool:
    """Whether a value may name parameters; which ones a model has is checked later."""
    return isinstance(value, str) and parameter_path(value)[0] in ("model", "objective")


def in_encoder(name: object) -> bool:
    """Whether a name stands for parameters of the encoder."""
    path = GROUPS["encoder"]
    return names_parameters(name) and parameter_path(name)[: len(path)] == path
