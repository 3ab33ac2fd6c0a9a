"""Pairwise cross-entropy: the loss of Hyp-ViT and Sph-ViT."""

import dataclasses

import jax
import jax.numpy as jnp
from einops import rearrange
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from hypjax.geometry import Space
from hypjax.objectives.base import Metrics, Spec
from hypjax.types import Batch, Outputs


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
    points = _by_subset(embeddings)
    return _cross_entropy(-space.distance_matrix(points, points) / temperature, samples)


def _by_subset(
    embeddings: Float[ArrayLike, "classes samples dim"],
) -> Float[Array, "images dim"]:
    """Lines the images up so that each subset's are neighbours, in the order of the classes."""
    return rearrange(embeddings, "n k d -> (k n) d")


def _cross_entropy(logits: Float[Array, "images images"], samples: int) -> Float[Array, ""]:
    """The loss of a batch's logits, rows and columns lined up by subset."""
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
        features = rearrange(outputs.projected, "(n k) d -> n k d", k=self.samples_per_class)
        points = _by_subset(self.space.embed(features))
        logits = -self.space.distance_matrix(points, points) / self.temperature
        loss = _cross_entropy(logits, self.samples_per_class)
        metrics = _telemetry(self.space, features, points, logits)
        return loss, (state, metrics)


def _telemetry(
    space: Space,
    features: Float[Array, "classes samples dim"],
    points: Float[Array, "images dim"],
    logits: Float[Array, "images images"],
) -> Metrics:
    """What tells how training goes, apart from the loss.

    Returns:
        Mean norm of the head's output and of its points in the space, share of clipped features,
        range of the logits of different images, and share of images whose nearest neighbour in the
        batch is of their class, and no other class's is as near.
    """
    features, points, logits = lax.stop_gradient((features, points, logits))
    blocks = rearrange(logits, "(i a) (j b) -> i a j b", a=len(features), b=len(features))
    same_class = jnp.diagonal(blocks, axis1=1, axis2=3)  # i, j, a
    other_sample = ~jnp.eye(len(same_class), dtype=bool)[..., None]
    match = jnp.max(same_class, axis=1, where=other_sample, initial=-jnp.inf).reshape(-1)
    classes = jnp.arange(len(points)) % len(features)
    negatives = jnp.where(classes[:, None] != classes, logits, -jnp.inf)
    nearest = jnp.max(negatives, axis=-1)
    # Taken from the negatives, which are in memory already, and not from the logits.
    least = jnp.min(negatives, where=negatives > -jnp.inf, initial=jnp.inf)
    return {
        "feature_norm": jnp.mean(jnp.linalg.norm(features, axis=-1)),
        "embedding_norm": jnp.mean(jnp.linalg.norm(points, axis=-1)),
        "clipped_share": jnp.mean(space.clipped(features)),
        "logit_min": jnp.minimum(least, jnp.min(same_class)),
        "logit_max": jnp.max(jnp.maximum(match, nearest)),
        "batch_recall@1": jnp.mean(match > nearest),
    }
