"""HypHC: a tree of leaves in the ball by the depths of common ancestors (NeurIPS 2020).

Chami et al., "From Trees to Continuous Embeddings and Back: Hyperbolic Hierarchical Clustering".
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from hypjax.fields import ABOVE_0, Field, at_least, one_of, within
from hypjax.geometry import Sphere, poincare
from hypjax.objectives.base import Loss, Metrics
from hypjax.objectives.comparisons import mean_where
from hypjax.objectives.hier import Triplets
from hypjax.objectives.label_tree import Tree, TreeExtension, labels_by_level
from hypjax.types import Outputs


def hyphc(
    leaves: Float[ArrayLike, "n d"],
    triples: Int[ArrayLike, "t 3"],
    similarities: Float[ArrayLike, "n n"],
    valid: Bool[ArrayLike, " t"],
    *,
    temperature: float = 0.05,
) -> Float[Array, ""]:
    """Loss of triples of leaves in the ball of c = 1 (HypHC, Section 4).

    Let o_ab be the distance from the origin to the geodesic through a and b, and w the softmax of
    (o_ij, o_ik, o_jk)/τ. The loss is the mean over the valid triples, 0 without any, of

        s_ij + s_ik + s_jk − (w_ij·s_ij + w_ik·s_ik + w_jk·s_jk).

    It is least if the lowest common ancestors of the most similar leaves are farthest out.
    """
    i, j, k = jnp.asarray(triples).T
    first, second = jnp.stack([i, i, j]), jnp.stack([j, k, k])
    leaves, alike = jnp.asarray(leaves), jnp.asarray(similarities)[first, second]
    depths = poincare.lca_distance(leaves[first], leaves[second], 1)
    weights = jax.nn.softmax(depths / temperature, axis=0)
    return mean_where(jnp.sum(alike - weights * alike, axis=0), jnp.asarray(valid))


def label_triples(levels: Int[Array, "levels n"], key: PRNGKeyArray, count: int) -> Triplets:
    """Draws `count` triples (i, j, k) for each leaf i and level: levels · n · `count` in all.

    At that level, j has the label of i and k has another one; without such a j or k, the triple is
    not valid. Draws are with replacement.
    """
    alike = levels[:, :, None] == levels[:, None]
    among = jnp.stack([alike & ~jnp.eye(levels.shape[1], dtype=bool), ~alike])
    logits = jnp.where(among, 0, -jnp.inf)
    j, k = jax.random.categorical(key, logits[..., None, :], shape=(*among.shape[:-1], count))
    i = jnp.broadcast_to(jnp.arange(levels.shape[1])[:, None], j.shape)
    valid = jnp.repeat(jnp.all(jnp.any(among, axis=-1), axis=0), count)
    return Triplets(jnp.stack([i, j, k], axis=-1).reshape(-1, 3), valid)


@dataclasses.dataclass(frozen=True)
class HypHC(TreeExtension):
    """A base loss, plus HypHC's loss of triples of images, or of proxies of their classes.

    Leaves are the directions of the head's outputs or of the proxies, at one radius in a ball of
    their own. Two leaves are as similar as the share of levels, of classes and coarse classes, at
    which their labels agree. This and the choice of triples are ours: HypHC has no labels.
    """

    declared = {
        "hyphc_weight": Field(0.1, at_least(0)),  # Our choice, as of the radius and the triples.
        "hyphc_temperature": Field(0.05, ABOVE_0),  # τ.
        "hyphc_radius": Field(0.9, within(0.01, 0.999)),  # Norm of all leaves; HypHC learns it.
        "hyphc_triples": Field(10, within(1, 10**4)),  # Of each leaf at each level of labels.
        "hyphc_leaves": Field("images", one_of("images", "proxies")),
    }
    weight: float
    temperature: float
    radius: float
    triples: int
    leaves: str

    def tree_loss(
        self,
        params: dict,
        outputs: Outputs,
        labels: Int[Array, " n"],
        tree: Tree,
        key: PRNGKeyArray,
    ) -> tuple[Loss, Metrics]:
        """Loss of triples in a batch."""
        features = outputs.projected
        if self.leaves == "proxies":
            proxies = params["base"]["proxies"]  # Perhaps several of each class.
            features = proxies[labels].reshape(-1, proxies.shape[-1])
            labels = jnp.repeat(labels, len(features) // len(labels))
        levels = labels_by_level(labels, tree[:-1])
        triples = label_triples(levels, key, self.triples)
        similarities = jnp.mean(levels[:, :, None] == levels[:, None], axis=0)
        leaves = self.radius * Sphere().embed(features)
        loss = hyphc(
            leaves, triples.indices, similarities, triples.valid, temperature=self.temperature
        )
        return self.weight * loss, {"hyphc_loss": loss}
