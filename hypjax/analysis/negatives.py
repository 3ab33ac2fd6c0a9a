"""The hard negatives of trained runs: their weights in the loss (HypMix, Figures 1 and 3)."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int
from ml_collections import ConfigDict

from hypjax.analysis.negatives_result import CARRIED, Hardest, Weighed
from hypjax.analysis.run_embeddings import head_points, open_datasets, saved_configs, searched
from hypjax.data.parts import Splits
from hypjax.errors import UserError, redacted
from hypjax.geometry import Space
from hypjax.inference.weights import restore_best
from hypjax.objectives import create_objective, negative_weights, softmax_temperature
from hypjax.runs.cloud_copy import reading
from hypjax.runs.workdir import Workdir

_BLOCK = 64  # Anchors that are compared with all images at once.


class Choice(NamedTuple):
    """Anchors, and what is asked of their negatives.

    Attributes:
        anchors: Indices of the anchors among the test images.
        shown: Number of anchors, the first ones, whose hardest negatives are listed.
        labels: Classes of the anchors.
        items: Classes of all images that are searched.
        k: Number of negatives to list.
        class_name: From the index of an image that is searched to the name of its class.
    """

    anchors: Int[np.ndarray, " anchors"]
    shown: int
    labels: Int[np.ndarray, " anchors"]
    items: Int[np.ndarray, " items"]
    k: int
    class_name: Callable[[int], str]

    @classmethod
    def of(cls, splits: Splits, named: Sequence[int], number: int, shown: int, k: int) -> Self:
        """Chooses anchors at equal distances among the test images, which are sorted by class.

        Args:
            splits: The dataset.
            named: Indices of the anchors, which are all shown; empty to choose them.
            number: Number of anchors to choose, if there are as many.
            shown: Number of them to show.
            k: Number of negatives to list for each.

        Raises:
            UserError: There is no such image, or an anchor has fewer negatives.
        """
        count = len(splits.test)
        for index in named:
            if not 0 <= index < count:
                raise UserError(f"--index is {index}; the test images are 0 to {count - 1}")
        if named:
            chosen, shown = np.array(named), len(named)
        else:
            chosen, first = _evenly(count, number), _evenly(min(count, number), shown)
            chosen = np.concatenate([chosen[first], np.delete(chosen, first)])
            shown = len(first)
        images = searched(splits)
        labels, items = splits.test.labels[chosen], images.labels
        fewest = min(int(np.sum(items != label)) for label in np.unique(labels))
        if k > fewest:
            raise UserError(f"--k is {k}, but an anchor has only {fewest} negatives")
        return cls(chosen, shown, labels, items, k, images.class_name)


def _evenly(count: int, most: int) -> Int[np.ndarray, " chosen"]:
    """Indices below `count`, at equal distances."""
    return np.linspace(0, count - 1, min(most, count)).round().astype(int)


def open_runs(workdirs: Sequence[str]) -> tuple[dict[str, ConfigDict], dict[str, Splits]]:
    """Reads the configurations of runs, and opens the dataset of each.

    Args:
        workdirs: Folders or URLs of the runs.

    Returns:
        The configurations and the datasets, by workdir.

    Raises:
        UserError: A folder holds no run, a run's objective has no softmax over negatives, or the
            runs have different test images.
    """
    configs = saved_configs(workdirs)
    for workdir, config in configs.items():
        try:
            softmax_temperature(config)
        except UserError as error:
            raise UserError(f"the run in {redacted(workdir)} cannot be analysed: {error}") from None
    return configs, open_datasets(configs)


def weigh_run(
    name: str, workdir: str, config: ConfigDict, splits: Splits, choice: Choice
) -> Weighed:
    """Embeds the test images with a run's best model, or its last, and weighs their negatives.

    Points are those of the loss: in its space, and without the projections of `eval.pca`.

    Args:
        name: Name of the run in reports.
        workdir: Folder or URL of the run.
        config: Its configuration.
        splits: Its dataset.
        choice: The anchors, and what is asked of their negatives.

    Raises:
        UserError: The folder holds no trained model, the images have changed, an image cannot be
            read, a point is not finite, or the device's memory does not suffice.
    """
    space = create_objective(config).space
    with reading(workdir) as folder:
        Workdir(folder, config, compared=()).require({"images": splits.fingerprint})
        model, params = restore_best(folder)
    embed = head_points(config, model, params, space)
    items = embed(searched(splits))
    if splits.gallery:
        anchors = embed(splits.test.take(choice.anchors))
    else:
        anchors = items[choice.anchors]
    return weigh(name, anchors, items, choice, space, softmax_temperature(config))


def weigh(
    name: str,
    anchors: Float[np.ndarray, "anchors dim"],
    items: Float[np.ndarray, "items dim"],
    choice: Choice,
    space: Space,
    temperature: float,
) -> Weighed:
    """Weighs the negatives of anchors, which are the items of other classes.

    Distances and weights are float64. Memory for some blocks of anchors by items is enough.

    Args:
        name: Name of the run in reports.
        anchors: Points of the space.
        items: Points of the space.
        choice: The classes of both, and what is asked.
        space: Space of the loss.
        temperature: By what the loss divides distances.
    """
    curve, carriers, hardest = np.zeros(len(items)), [], []
    for distances, weights in _blocks(anchors, items, choice, space, temperature):
        falling = -np.sort(-weights, axis=1)
        curve += np.sum(falling, axis=0)
        carriers.append(1 + np.argmax(np.cumsum(falling, axis=1) >= CARRIED, axis=1))
        for row in range(min(len(distances), choice.shown - len(hardest))):
            found = np.argsort(distances[row], stable=True)[: choice.k]
            columns = (column[row][found].tolist() for column in (distances, weights))
            hardest.append(Hardest(found.tolist(), [*map(choice.class_name, found)], *columns))
    negatives = max(int(np.sum(choice.items != label)) for label in np.unique(choice.labels))
    curve = curve[:negatives] / len(anchors)
    return Weighed(name, temperature, np.concatenate(carriers), curve, hardest)


def _blocks(
    anchors: Float[np.ndarray, "anchors dim"],
    items: Float[np.ndarray, "items dim"],
    choice: Choice,
    space: Space,
    temperature: float,
) -> Iterator[tuple[Float[np.ndarray, "block items"], Float[np.ndarray, "block items"]]]:
    """Yields distances, infinite to what is no negative, and weights of some anchors at a time."""

    @jax.jit
    def compare(points, labels, items, classes):
        negatives = labels[:, None] != classes
        distances = space.distance_matrix(points, items)
        weights = negative_weights(distances, negatives, temperature=temperature)
        return jnp.where(negatives, distances, jnp.inf), weights

    with jax.enable_x64(True):
        doubled = jnp.asarray(items, jnp.float64)
    for start in range(0, len(anchors), _BLOCK):
        block = slice(start, start + _BLOCK)
        with jax.enable_x64(True):
            points = jnp.asarray(anchors[block], jnp.float64)
            found = compare(points, choice.labels[block], doubled, choice.items)
        yield tuple(map(np.asarray, found))
