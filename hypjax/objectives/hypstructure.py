"""HypStructure: distances between centres of classes follow the tree of labels.

Sinha et al., "Learning Structured Representations with Hyperbolic Embeddings" (NeurIPS 2024).
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from hypjax.fields import ABOVE_0, Field, at_least, one_of, within
from hypjax.geometry import Lorentz, arithmetic, lorentz
from hypjax.geometry.arithmetic import Scalar
from hypjax.objectives.base import Loss, Metrics
from hypjax.objectives.comparisons import mean_where
from hypjax.objectives.label_tree import Tree, TreeExtension, labels_by_level
from hypjax.types import Outputs

_FLAT = 1e-3  # Standard deviation of distances that may be rounding errors far from the origin.


def hyp_cpcc(
    points: Float[Array, "n d"], levels: Int[Array, "levels n"], most: Sequence[int], c: Scalar
) -> tuple[Float[Array, ""], Float[Array, " d"]]:
    """HypCPCC, the correlation of distances with a tree of labels; and the centroid of all points.

    Nodes are the groups of points with equal labels at a level. Over all pairs of nodes, it is
    Pearson's correlation of the distance of their centroids with the length of their path in the
    tree. Where distances or paths do not differ, it is 1, without a gradient (the authors' code:
    NaN → 1).

    Args:
        points: Points of the hyperboloid of curvature −c.
        levels: Labels from 0 at each level, each of which divides the next; the last is the root.
        most: For each level, a bound of the number of its labels in `levels`.
        c: As in `hypjax.geometry.lorentz`.
    """
    unique = functools.partial(jnp.unique, return_index=True, return_inverse=True, fill_value=-1)
    nodes = [unique(x, size=size) for x, size in zip(levels, most, strict=True)]
    labels, first, groups = zip(*nodes, strict=True)
    centres = [lorentz.centroids(points, *x, c) for x in zip(groups, most, strict=True)]
    centres, present = jnp.concatenate(centres), jnp.concatenate(labels) >= 0
    # By subtraction, since a parent lies where its only child does; rows in turn, or [m, m, d]
    # numbers, a gigabyte for 900 classes, would be held for the gradient.
    row = jax.checkpoint(lambda centre: lorentz.dist(centre, centres, c))
    distances = lax.map(row, centres, batch_size=64)
    paths = _path_lengths(levels[:, jnp.concatenate(first)], np.repeat(range(len(most)), most))
    pairs = present[:, None] & present & ~np.eye(len(centres), dtype=bool)
    return _correlation(distances, paths.astype(distances.dtype), pairs), centres[-1]


def _path_lengths(above: Int[Array, "levels m"], level: Int[np.ndarray, " m"]) -> Array:
    """Edges between nodes, [m, m], from the nodes above them and their own level."""
    higher = np.maximum(level[:, None], level)
    apart = (above[:, :, None] != above[:, None]) & (np.arange(len(above))[:, None, None] >= higher)
    # The lowest common ancestor is as far above the higher of the two as their ancestors differ.
    return 2 * (higher + jnp.sum(apart, axis=0)) - level[:, None] - level


def _correlation(x: Array, y: Array, where: Bool[Array, "m m"]) -> Float[Array, ""]:
    x, y = (values - mean_where(values, where) for values in (x, y))
    xx, yy, xy = (mean_where(values, where) for values in (x * x, y * y, x * y))
    flat = (xx < _FLAT**2) | (yy < _FLAT**2)
    return jnp.where(flat, 1, xy / jnp.sqrt(jnp.where(flat, 1, xx * yy)))


@dataclasses.dataclass(frozen=True)
class HypStructure(TreeExtension):
    """A base loss, plus α·(1 − HypCPCC) + β·‖centroid of the batch‖ (HypStructure, Eqs. 6 and 8).

    Features enter a ball of their own by the exponential map, whatever space the base has.
    """

    declared = {
        "structure_weight": Field(1.0, at_least(0)),  # α.
        "structure_centring": Field(0.01, at_least(0)),  # β.
        "structure_c": Field(1.0, ABOVE_0),
        "structure_clipping": Field(1 - 4e-3, within(1e-3, 1 - 1e-4)),  # Largest √c‖x‖ of points.
        "structure_features": Field("encoder", one_of("encoder", "head")),  # The paper's: encoder.
    }
    weight: float
    centring: float
    c: float
    clipping: float
    features: str

    def tree_loss(
        self, outputs: Outputs, labels: Int[Array, " n"], tree: Tree, **_: Any
    ) -> tuple[Loss, Metrics]:
        """The regulariser of a batch, whose centroids are computed on the hyperboloid."""
        features = outputs.pooled if self.features == "encoder" else outputs.projected
        space = Lorentz(self.c, math.atanh(self.clipping) / self.c**0.5)
        classes = len(labels) // self.samples_per_class
        most = [*(min(len(parents), classes) for parents in tree), 1]
        levels = labels_by_level(labels, tree)
        correlation, centre = hyp_cpcc(space.embed(features), levels, most, self.c)
        offset = arithmetic.sqrt(arithmetic.square_norm(space.to_ball(centre), keepdims=False))
        clipped = jnp.mean(space.clipped(features))
        curves = {"correlation": correlation, "offset": offset, "clipped": clipped}
        loss = self.weight * (1 - correlation) + self.centring * offset
        return loss, {f"structure_{name}": value for name, value in curves.items()}
