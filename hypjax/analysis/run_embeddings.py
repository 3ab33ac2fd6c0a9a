"""Trained runs whose embeddings of the same test images are compared."""

from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Float, PyTree
from ml_collections import ConfigDict

from hypjax.data.dataset import Dataset
from hypjax.data.parts import Splits
from hypjax.data.splits import open_splits
from hypjax.errors import UserError, redacted
from hypjax.geometry import Space
from hypjax.inference.embedding import DatasetEmbedder, Encodings, evaluation_input
from hypjax.models import Embedder
from hypjax.runs.cloud_copy import reading
from hypjax.runs.workdir import Workdir, saved_config
from hypjax.system import console


def saved_configs(workdirs: Sequence[str]) -> dict[str, ConfigDict]:
    """Reads the configurations of runs; says which are not finished.

    Args:
        workdirs: Folders or URLs of the runs.

    Raises:
        UserError: A folder holds no run.
    """
    configs = {}
    for workdir in workdirs:
        with reading(workdir) as folder:
            configs[workdir] = saved_config(folder)
            if Workdir(folder, configs[workdir], compared=()).results is None:
                console.say(f"{redacted(workdir)} is not finished; its best model so far is used")
    return configs


def open_datasets(configs: dict[str, ConfigDict]) -> dict[str, Splits]:
    """Opens the dataset of each run.

    Args:
        configs: Configurations of the runs, by workdir.

    Raises:
        UserError: The runs have different test images, or a dataset cannot be opened.
    """
    splits = {workdir: open_splits(config) for workdir, config in configs.items()}
    first, *others = splits
    for other in others:
        if not _same_test_images(splits[first], splits[other]):
            raise UserError(
                f"the runs in {redacted(first)} and {redacted(other)} have different test images; "
                "name runs of the same dataset with the same test classes"
            )
    return splits


def searched(splits: Splits) -> Dataset:
    """The images that the test images search."""
    return splits.gallery or splits.test


def _same_test_images(one: Splits, other: Splits) -> bool:
    pairs = (one.test, other.test), (searched(one), searched(other))
    return one.fingerprint == other.fingerprint and all(
        np.array_equal(a.positions, b.positions) and np.array_equal(a.labels, b.labels)
        for a, b in pairs
    )


def head_points(
    config: ConfigDict,
    model: Embedder,
    params: PyTree,
    space: Space,
    encodings: Encodings | None = None,
) -> Callable[[Dataset], Float[np.ndarray, "images dim"]]:
    """Returns the function that embeds a dataset with the head, without the run's `eval.pca`.

    It raises a `UserError` if an image cannot be read, a point is not one of the space, or the
    device's memory does not suffice.

    Args:
        config: The run's configuration.
        model: The run's model, as it is evaluated.
        params: Its parameters.
        space: Space of the points.
        encodings: What the run has kept of its frozen encoder's embeddings.
    """
    source, scaling = evaluation_input(config), (config.data.mean, config.data.std)
    images = DatasetEmbedder(model, {"head": space}, scaling, source, config.eval.scales, encodings)

    def points(dataset: Dataset) -> Float[np.ndarray, "images dim"]:
        found = images.points(params, dataset)["head"]
        space.check(found)
        return found

    return points
