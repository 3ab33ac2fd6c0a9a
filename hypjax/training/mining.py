"""Mines the tuples of an epoch with the model as it is at its start."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from hypjax.data.plans import TuplePlans
from hypjax.geometry import Space
from hypjax.inference.embedding import ONE_SCALE
from hypjax.inference.features import DatasetEmbedder
from hypjax.objectives.comparisons import lengths
from hypjax.parallel import processes
from hypjax.retrieval.mining import hardest_negatives
from hypjax.training.setup import Setup


class Mined(NamedTuple):
    """An epoch's tuples.

    Attributes:
        table: Positions of each tuple's images in the training set: anchor, positive, negatives.
        metrics: Mean lengths between anchors and positives, mined negatives, and random images, as
            the loss measures them.
    """

    table: Int[np.ndarray, "tuples size"]
    metrics: dict[str, float]


@dataclasses.dataclass(frozen=True, eq=False)
class Miner:
    """Draws pairs and a pool, embeds them under the test view, and finds each anchor's negatives.

    Attributes:
        setup: The run, whose plans are tuples.
    """

    setup: Setup

    @property
    def plans(self) -> TuplePlans:
        """The plans of the run."""
        return self.setup.plans

    def mine(self, params: PyTree, epoch: int) -> Mined:
        """Mines the tuples of an epoch.

        Args:
            params: Parameters of the model.
            epoch: Number of the epoch, from 0.

        Raises:
            UserError: An image cannot be read, the device's memory does not suffice, or the pool
                has too few classes.
        """
        plans, space = self.plans, self.setup.learner.objective.space
        pairs, pool = plans.candidates(epoch)
        anchors, positives = pairs.T
        # Each image is embedded once, in the order of the files.
        ids, rows = np.unique(np.concatenate([anchors, positives, pool]), return_inverse=True)
        points = self._points(params, ids)
        firsts, seconds, others = np.split(points[rows], [len(anchors), 2 * len(anchors)])
        labels = plans.labels
        negatives = hardest_negatives(
            *(firsts, labels[anchors], others, labels[pool]), count=plans.negatives, space=space
        )
        table = np.column_stack([anchors, positives, pool[negatives]]).astype(np.int32)
        table = processes.arrays_from_first(lambda: table, table)
        distances = {
            "positive_distance": _mean_distance(space, firsts, seconds),
            "negative_distance": _mean_distance(space, firsts[:, None], others[negatives]),
            "random_distance": _mean_distance(space, firsts, np.resize(others, firsts.shape)),
        }
        return Mined(table, distances)

    @functools.cached_property
    def _images(self) -> DatasetEmbedder:
        spaces = {"head": self.setup.learner.objective.space}
        return dataclasses.replace(self.setup.evaluator.images, spaces=spaces, scales=ONE_SCALE)

    def _points(self, params: PyTree, ids: Int[np.ndarray, " n"]) -> Float[np.ndarray, "n d"]:
        return self._images.points(params, self.setup.splits.train.take(ids))["head"]


def _mean_distance(
    space: Space, x: Float[np.ndarray, "*#b d"], y: Float[np.ndarray, "*#b d"]
) -> float:
    return float(np.mean(_distances(space, x, y)))


@jax.jit
def _distances(
    space: Space, x: Float[Array, "*#b d"], y: Float[Array, "*#b d"]
) -> Float[Array, "*b"]:
    return lengths(space, space.distance(x, y))
