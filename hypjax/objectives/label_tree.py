"""Losses of the label tree, which are added to another loss: HypStructure and HypHC.

Sinha et al., "Learning Structured Representations with Hyperbolic Embeddings" (NeurIPS 2024), and
Chami et al., "From Trees to Continuous Embeddings and Back: Hyperbolic Hierarchical Clustering"
(NeurIPS 2020).
"""

import abc
import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from hypjax.fields import ABOVE_0, at_least, one_of, within
from hypjax.geometry import Lorentz, Sphere, arithmetic, lorentz, poincare
from hypjax.geometry.arithmetic import AnyArray, Scalar
from hypjax.objectives.base import Extension, Loss, LossResult, Metrics, ProblemSizes, setting
from hypjax.objectives.comparisons import mean_where
from hypjax.objectives.hier import Triplets, draw_columns
from hypjax.types import Batch, Outputs

Levels = Int[Array, "levels n"]  # Labels at each level, finest first.


@dataclasses.dataclass(frozen=True)
class TreeExtension(Extension):
    """Adds a subclass's `tree_loss` to a base loss in any space."""

    @abc.abstractmethod
    def tree_loss(self, *values: Any, **named: Any) -> tuple[Loss, Metrics]:
        """Loss of a batch, and its metrics.

        An implementation takes, by name, what it needs of `params`, `outputs` and `key`; `levels`,
        the images' labels at each level of the tree from the classes up to the root; and `counts`,
        the number of labels at each level.
        """

    def init(self, key: PRNGKeyArray, spec: ProblemSizes) -> tuple[dict, dict]:
        """Returns the base's parameters, and its state with the tree.

        The tree holds the parent of each label at each level. The root is the parent of the
        coarsest classes, or, without coarse classes, of all classes.
        """
        params, state = self.base.init(key, spec)
        levels = map(np.asarray, (range(spec.classes), *spec.coarse_labels, [0] * spec.classes))
        tree = []
        for fine, coarse in itertools.pairwise(levels):
            parents = np.zeros(fine.max() + 1, np.int32)
            parents[fine] = coarse
            tree.append(jnp.asarray(parents))
        return {"base": params}, {"base": state, "tree": tuple(tree)}

    def loss(
        self, params: dict, state: dict, batch: Batch, key: PRNGKeyArray, **others: Any
    ) -> LossResult:
        """Loss of a batch, see `Objective.loss`."""
        base_key, tree_key = jax.random.split(key)
        loss, (base_state, metrics) = self.base_loss(
            params=params["base"], state=state["base"], batch=batch, key=base_key, **others
        )
        tree, classes = state["tree"], jnp.asarray(batch.labels, jnp.int32)
        levels = [*itertools.accumulate(tree, lambda labels, up: up[labels], initial=classes)]
        counts = [len(parents) for parents in tree] + [1]
        tree_loss, tree_metrics = self.tree_loss(
            params=params, key=tree_key, levels=jnp.stack(levels), counts=counts, **others
        )
        return loss + tree_loss, (state | {"base": base_state}, metrics | tree_metrics)


def hyp_cpcc(
    points: Float[Array, "n d"], levels: Levels, counts: Sequence[int], c: Scalar
) -> tuple[Float[Array, ""], Float[Array, " d"]]:
    """Correlates distances with paths in a label tree (HypCPCC); also returns the root's centroid.

    Nodes are groups of points with equal labels at a level. HypCPCC is Pearson's correlation, over
    all pairs of nodes, between the distance of their centroids and the length of their path in the
    tree; as in the authors' code, 1 without a gradient if all distances or all paths are equal.

    Points lie on the hyperboloid of curvature −c. Labels count from 0. Each level refines the next
    level, and the last level is the root. `counts` are the numbers of labels at each level. Raises
    a `ValueError` if there is no point.
    """
    if not len(points):
        raise ValueError(f"needs one point or more, got {points.shape}")
    sizes = [min(count, len(points)) for count in counts]  # Most labels that a batch can have.
    unique = functools.partial(jnp.unique, return_index=True, return_inverse=True, fill_value=-1)
    nodes = [unique(x, size=size) for x, size in zip(levels, sizes, strict=True)]
    labels, first_rows, groups_by_level = zip(*nodes, strict=True)
    groups_and_sizes = zip(groups_by_level, sizes, strict=True)
    centres = jnp.concatenate([lorentz.centroids(points, *pair, c) for pair in groups_and_sizes])
    present = jnp.concatenate(labels) >= 0  # Other nodes are padding.
    # Computed by subtraction: a parent coincides with its only child, at distance exactly 0.
    # Without the checkpoint, the gradient would hold [m, m, d], a gigabyte for 900 classes.
    row = jax.checkpoint(lambda centre: lorentz.dist(centre, centres, c))
    distances = lax.map(row, centres, batch_size=64)
    node_levels = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
    paths = _path_lengths(node_levels, levels[:, jnp.concatenate(first_rows)])
    pairs = present[:, None] & present[None] & ~np.eye(len(centres), dtype=bool)
    # Rounding errors of distances grow like cosh(√c·r): a smaller standard deviation is noise.
    farthest = jnp.max(arithmetic.square_norm(centres), where=present[:, None], initial=0)
    rounding = 32 * jnp.finfo(distances.dtype).eps * jnp.sqrt(1 / c + lax.stop_gradient(farthest))
    return _correlation(distances, paths.astype(distances.dtype), pairs, rounding), centres[-1]


def _path_lengths(
    node_levels: Int[np.ndarray, " m"], ancestors: Int[Array, "levels m"]
) -> Int[Array, "m m"]:
    """Lengths of paths between all pairs of nodes, from each node's ancestors at all levels."""
    # The lowest common ancestor lies above the higher of two nodes by the number of levels, from
    # that node's level on, at which the two nodes have different ancestors.
    higher = np.maximum(node_levels[:, None], node_levels)
    differ = ancestors[:, :, None] != ancestors[:, None]
    differ &= np.arange(len(ancestors))[:, None, None] >= higher[None]
    paths = 2 * (higher + jnp.sum(differ, axis=0, dtype=jnp.int32)) - node_levels[:, None]
    return paths - jnp.asarray(node_levels)[None]


def _correlation(
    x: Float[Array, "m m"], y: Float[Array, "m m"], where: Bool[Array, "m m"], min_std: Array
) -> Float[Array, ""]:
    """Pearson's correlation; 1 if a standard deviation is below `min_std`."""
    x, y = (values - mean_where(values, where) for values in (x, y))
    xx, yy, xy = (mean_where(values, where) for values in (x * x, y * y, x * y))
    flat = (xx < min_std**2) | (yy < min_std**2)
    return jnp.where(flat, 1, xy / jnp.sqrt(jnp.where(flat, 1, xx * yy)))


@dataclasses.dataclass(frozen=True)
class HypStructure(TreeExtension):
    """Adds α·(1 − HypCPCC) + β·‖centroid of the batch‖ to a base loss (HypStructure, Eqs. 6 and 8).

    The exponential map takes features to a separate ball, whose c does not depend on the base's
    space. Centroids are computed on the hyperboloid.
    """

    prefix = "structure_"
    weight: float = setting(1.0, at_least(0))  # α.
    centring: float = setting(0.01, at_least(0))  # β.
    c: float = setting(1.0, ABOVE_0)
    clipping: float = setting(1 - 4e-3, within(1e-3, 1 - 1e-4))  # Largest √c‖x‖ of points.
    features: str = setting("encoder", one_of("encoder", "head"))  # The paper: encoder.

    def tree_loss(
        self, outputs: Outputs, levels: Levels, counts: Sequence[int], **_: Any
    ) -> tuple[Loss, Metrics]:
        """Computes the regulariser of a batch, and its metrics."""
        features = outputs.pooled if self.features == "encoder" else outputs.projected
        space = Lorentz(self.c, clip_radius=math.atanh(self.clipping) / self.c**0.5)
        correlation, centre = hyp_cpcc(space.embed(features), levels, counts, self.c)
        offset = arithmetic.sqrt(arithmetic.square_norm(space.to_ball(centre), keepdims=False))
        return self.weight * (1 - correlation) + self.centring * offset, {
            "structure_correlation": correlation,
            "structure_offset": offset,
            "structure_clipped": jnp.mean(space.clipped(features)),
        }


def hyphc(
    leaves: Float[AnyArray, "n d"],
    triples: Triplets,
    similarities: Float[AnyArray, "n n"],
    *,
    temperature: Scalar = 0.05,
) -> Float[Array, ""]:
    """Loss of triples of leaves in the ball of c = 1 (HypHC, Section 4).

    Let s_ab be similarities, o_ab the distance from the origin to the geodesic through a and b, and
    w the softmax of (o_ij, o_ik, o_jk)/τ. The loss is the mean over valid triples (0 if none) of

        s_ij + s_ik + s_jk − (w_ij·s_ij + w_ik·s_ik + w_jk·s_jk).

    The loss is smallest if the lowest common ancestors of the most similar leaves are farthest out.
    """
    i, j, k = jnp.asarray(triples.indices).T
    first, second = jnp.stack([i, i, j]), jnp.stack([j, k, k])  # The pairs ij, ik and jk.
    leaves = jnp.asarray(leaves)
    similar = jnp.asarray(similarities, leaves.dtype)[first, second]
    depths = poincare.lca_distance(leaves[first], leaves[second], 1)
    weights = jax.nn.softmax(depths / temperature, axis=0)
    return mean_where(jnp.sum(similar - weights * similar, axis=0), jnp.asarray(triples.valid))


def label_triples(levels: Levels, ids: Int[Array, " n"], key: PRNGKeyArray, count: int) -> Triplets:
    """Draws `count` triples (i, j, k) for each leaf i and level: levels · n · `count` in all.

    At that level, j has the same label as i, and k another label; if no leaf qualifies as j or as
    k, the triple is not valid. Rows with equal `ids` are the same leaf, and never i and j of a
    triple. Draws are with replacement.
    """
    triples, valid = [], []
    for labels, level_key in zip(levels, jax.random.split(key, len(levels)), strict=True):
        same_label = labels[:, None] == labels[None]
        may_be_j = same_label & (ids[:, None] != ids[None])
        may_be_k = ~same_label
        keys_and_masks = zip(jax.random.split(level_key), (may_be_j, may_be_k), strict=True)
        j, k = (draw_columns(key, mask, count) for key, mask in keys_and_masks)
        i = jnp.broadcast_to(jnp.arange(len(ids))[:, None], j.shape)
        triples.append(jnp.stack([i, j, k], axis=-1).reshape(-1, 3))
        valid.append(jnp.repeat(may_be_j.any(axis=1) & may_be_k.any(axis=1), count))
    return Triplets(jnp.concatenate(triples), jnp.concatenate(valid))


@dataclasses.dataclass(frozen=True)
class HypHC(TreeExtension):
    """Adds HypHC's loss, of triples of images or of their classes' proxies, to a base loss.

    Leaves are the directions of the head's outputs or of the proxies, at a fixed radius in the ball
    of c = 1, for any space of the base. The similarity of two leaves is the share of levels
    (classes and coarse classes) at which their labels agree. This similarity and the choice of
    triples are hypjax's: HypHC takes similarities as its input, and no labels.
    """

    prefix = "hyphc_"
    weight: float = setting(0.1, at_least(0))  # hypjax's choice, like the radius and the triples.
    temperature: float = setting(0.05, ABOVE_0)  # τ.
    radius: float = setting(0.9, within(0.01, 0.999))  # Norm of all leaves; HypHC learns it.
    triples: int = setting(10, within(1, 10**4))  # Triples of each leaf at each level of labels.
    leaves: str = setting("images", one_of("images", "proxies"))

    def tree_loss(
        self, params: dict, outputs: Outputs, levels: Levels, key: PRNGKeyArray, **_: Any
    ) -> tuple[Loss, Metrics]:
        """Computes the loss of triples in a batch, and its metrics."""
        features = outputs.projected
        levels = levels[:-1]  # All leaves agree at the root.
        ids = jnp.arange(len(features))
        if self.leaves == "proxies":
            proxies = params["base"]["proxies"]  # [classes, dim] or [classes, centres, dim].
            proxy_ids = jnp.arange(math.prod(proxies.shape[:-1])).reshape(len(proxies), -1)
            ids = proxy_ids[levels[0]].ravel()
            features = proxies.reshape(-1, proxies.shape[-1])[ids]
            levels = jnp.repeat(levels, proxy_ids.shape[1], axis=1)
        leaves = self.radius * Sphere().embed(features)
        triples = label_triples(levels, ids, key, self.triples)
        similarities = jnp.mean(levels[:, :, None] == levels[:, None], axis=0)
        loss = hyphc(leaves, triples, similarities, temperature=self.temperature)
        return self.weight * loss, {"hyphc_loss": loss}
