"""Names that configuration fields accept; the packages above implement them.

A new dataset or view adds its name here and its code there. A test checks that they agree.
Objectives, spaces and metrics have registries of their own: `hypjax.objectives.OBJECTIVES`,
`hypjax.geometry.SPACES`, and `AT_K` and `WITHOUT_K` in `hypjax.retrieval.metrics`.
"""

import fnmatch
from collections.abc import Collection

from hypjax.objectives.base import GROUPED
from hypjax.retrieval.metrics import AT_K, WITHOUT_K

BENCHMARKS = ("roxford5k", "rparis6k")  # Judged, and without training images.
GIVEN = "own"  # The images that were passed to `hypjax.train`.
# The user's own data: images, features of any model, and what was passed.
USERS = ("folder", "features", GIVEN)
DATASETS = (  # hypjax/data/
    *("glyphs", "scenes", "cub200", "cars196", "sop", "inshop", "omniglot", "sfm120k"),
    *("grocery", "grocery_icons", *USERS),
    *BENCHMARKS,
)
OWN = "own:"  # Begins the names of the encoders and objectives that were.
HEADS = ("dense", "norm_dense", "none")  # hypjax/models/embedder.py
HEAD_INITS = ("orthogonal", "pca")  # hypjax/models/embedder.py, hypjax/training/head_init.py
PARTS = ("head", "encoder")  # Of a model; hypjax/inference/embedding.py
TRAIN_VIEWS = ("area_crop", "resize_crop")  # hypjax/data/views.py
TEST_VIEWS = ("centre_crop", "squash")  # hypjax/data/views.py
SAMPLINGS = (*GROUPED, "shuffled", "tuples")  # hypjax/data/plans.py
SPLITS_BY = ("classes", "images")  # hypjax/data/photo_dataset.py
METRICS = (*AT_K, *WITHOUT_K)
# Parameters with a name, by their path in {"model": ..., "objective": ...}.
GROUPS = {
    "patch_projection": ("model", "encoder", "patch_embed"),
    "encoder": ("model", "encoder"),
    "head": ("model", "head"),
    "space": ("model", "space"),
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
