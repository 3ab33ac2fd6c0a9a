"""Pairwise cross-entropy: the loss of Hyp-ViT and Sph-ViT."""

import dataclasses

import jax
import jax.numpy as jnp
from einops import rearrange
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from hypjax.geometry import Space
from hypjax.interfaces import Batch, Outputs
from hypjax.objectives.base import Metrics, Spec


def pairwise_cross_entropy(
    embeddings: Float[ArrayLike, "classes samples dim"], *, space: Space, temperature: float
) -> Float[Array, ""]:
    """Pairwise cross-entropy of a class-balanced batch (Hyp-ViT, Eq. 5).

    Sample k of every class makes subset k. For each ordered pair of subsets (i, j), i ≠ j, an image
    of subset i is to be nearer to the image of its class in j than to the rest of j and of i:
    cross-entropy of the logits −distance / temperature over j and over i without the anchor. The
    mean over anchors is summed over pairs.

    All pairs share the distance matrix of the batch: subset pair (i, j) is block (i, j) of it.

    Args:
        embeddings: Points of the space; at least two classes and two samples.
        space: Measures the distances.
        temperature: τ; the smaller, the more the nearest negatives weigh.

    Returns:
        The loss, a scalar.

    Raises:
        ValueError: With fewer than two classes or samples there is nothing to compare.
    """
    classes, samples, _ = embeddings.shape
    if classes < 2 or samples < 2:
        raise ValueError(f"needs at least 2 classes and 2 samples, got {classes} and {samples}")
    points = rearrange(embeddings, "n k d -> (k n) d")
    logits = -space.distance_matrix(points, points) / temperature
    blocks = rearrange(logits, "(i a) (j b) -> i j a b", i=samples, j=samples)
    own = jnp.eye(samples, dtype=bool)
    candidates, positives = jax.vmap(jax.vmap(_block_terms))(blocks, own)
    negatives = jnp.diagonal(candidates).T[:, None]  # of each anchor, in its own subset
    losses = jnp.mean(jnp.logaddexp(candidates, negatives) - positives, axis=-1)
    return jnp.sum(losses, where=~own)


def _block_terms(
    logits: Float[Array, "n n"], own: Bool[Array, ""]
) -> tuple[Float[Array, " n"], Float[Array, " n"]]:
    """What a block contributes to each of its anchors.

    Returns:
        The log-sum over the block's images, in the anchors' own subset without the anchor itself,
        and the logit of the image of the anchor's class.
    """
    same_class = jnp.eye(logits.shape[0], dtype=bool)
    candidates = jax.nn.logsumexp(logits, axis=-1, where=~(own & same_class))
    return candidates, jnp.sum(logits, axis=-1, where=same_class)


@dataclasses.dataclass(frozen=True)
class PairwiseCrossEntropy:
    """The objective of Hyp-ViT (in a `PoincareBall`) and Sph-ViT (on the `Sphere`).

    It has neither parameters nor state.

    Attributes:
        space: Where the head's output is embedded, trained and scored.
        temperature: τ of `pairwise_cross_entropy`.
        samples_per_class: Images of each class in a batch.
    """

    space: Space
    temperature: float
    samples_per_class: int

    @property
    def score_space(self) -> Space:
        """The head is scored where it is trained."""
        return self.space

    def init(self, key: PRNGKeyArray, spec: Spec) -> tuple[dict, dict]:
        """Returns two empty trees."""
        del key, spec
        return {}, {}

    def loss(
        self,
        params: dict,
        state: dict,
        outputs: Outputs,
        teacher: None,
        batch: Batch,
        key: PRNGKeyArray,
    ) -> tuple[Float[Array, ""], tuple[dict, Metrics]]:
        """Loss of a batch whose images of one class are neighbours."""
        del params, teacher, batch, key
        points = self.space.embed(outputs.projected)
        embeddings = rearrange(points, "(n k) d -> n k d", k=self.samples_per_class)
        loss = pairwise_cross_entropy(embeddings, space=self.space, temperature=self.temperature)
        return loss, (state, {})
