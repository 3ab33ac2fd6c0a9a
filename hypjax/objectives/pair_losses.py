"""Losses that compare the images of a batch with each other, or with those of a memory.

They are written in terms of the distance of a space. On the sphere they are the published losses of
the cosine; `hypjax.objectives.comparisons.similarity` says what takes its place in other spaces.
Batches may hold any numbers of images of each class. A batch with no two images of one class, or
with one class, is no special case: sums over no pairs are 0.
"""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int

from hypjax.geometry import Space
from hypjax.objectives.comparisons import (
    SPHERE,
    References,
    compare_images,
    log1p_sum_exp,
    log_sum_exp,
    mean_where,
    similarity,
)


def contrastive(
    embeddings: Float[ArrayLike, "n dim"],
    labels: Int[ArrayLike, " n"],
    *,
    space: Space = SPHERE,
    margin: float = 0.5,
    samples_per_class: int | None = None,
    references: References | None = None,
) -> Float[Array, ""]:
    """Contrastive loss, as in IRT (El-Nouby et al., 2021).

    (1/n) Σ_i [Σ_{same class} (1 − s_ij) + Σ_{other class} max(s_ij − β, 0)], over j ≠ i, where s is
    the cosine on the sphere and 1 − distance / 2 in other spaces. The sums grow with the batch.

    Args:
        embeddings: Points of the space, as from `space.embed`.
        labels: Class of each image.
        space: Space that measures the distances.
        margin: β, the similarity above which images of different classes repel each other.
        samples_per_class: If every so many images are of one class, their distances are computed by
            subtraction, which keeps the digits of small ones. With None, all distances are computed
            by products.
        references: Points to compare the images with, such as those of a memory; None compares
            them with each other.

    Returns:
        The loss, a scalar.

    Raises:
        ValueError: There is not one label for each image, or the images are no multiple of
            `samples_per_class`.
    """
    pairs = compare_images(space, embeddings, labels, samples_per_class, references)
    attraction = pairs.distances / 2
    repulsion = jax.nn.relu(similarity(pairs.distances) - margin)
    losses = jnp.where(pairs.same, attraction, repulsion)  # One array to sum: large with a memory.
    return jnp.sum(losses, where=pairs.same | pairs.other) / len(losses)


def multi_similarity(
    embeddings: Float[ArrayLike, "n dim"],
    labels: Int[ArrayLike, " n"],
    *,
    space: Space = SPHERE,
    alpha: float = 2.0,
    beta: float = 50.0,
    base: float = 0.5,
    mining: bool = True,
    epsilon: float = 0.1,
    samples_per_class: int | None = None,
    references: References | None = None,
) -> Float[Array, ""]:
    """Multi-similarity loss (Wang et al., CVPR 2019, Eq. 15).

    (1/n) Σ_i [log(1 + Σ_{same class} exp(−α·(s_ij − λ)))/α + log(1 + Σ_{other class} exp(β·(s_ij −
    λ)))/β], over j ≠ i, where s is the cosine on the sphere and 1 − distance / 2 in other spaces.

    Args:
        embeddings: Points of the space, as from `space.embed`.
        labels: Class of each image.
        space: Space that measures the distances.
        alpha: α > 0, the scale of positives.
        beta: β > 0, the scale of negatives.
        base: λ, the similarity that separates them.
        mining: Whether an image's negatives count only if they are more similar than its least
            similar positive, less ε, and its positives only if they are less similar than its most
            similar negative, plus ε (Eqs. 11 and 12). An image without either has the loss 0 then.
        epsilon: ε.
        samples_per_class: See `contrastive`.
        references: See `contrastive`.

    Returns:
        The loss, a scalar.

    Raises:
        ValueError: See `contrastive`.
    """
    pairs = compare_images(space, embeddings, labels, samples_per_class, references)
    positives, negatives = pairs.same, pairs.other
    s = similarity(pairs.distances)
    if mining:
        least = jnp.min(s, axis=1, keepdims=True, where=positives, initial=jnp.inf)
        largest = jnp.max(s, axis=1, keepdims=True, where=negatives, initial=-jnp.inf)
        # Written so that NaN counts: it must reach the loss.
        positives &= ~(s - epsilon >= largest)
        negatives &= ~(s + epsilon <= least)
    pull = log1p_sum_exp(-alpha * (s - base), positives, axis=1) / alpha
    push = log1p_sum_exp(beta * (s - base), negatives, axis=1) / beta
    return jnp.mean(pull + push)


def supcon(
    embeddings: Float[ArrayLike, "n dim"],
    labels: Int[ArrayLike, " n"],
    *,
    space: Space = SPHERE,
    temperature: float = 0.1,
    samples_per_class: int | None = None,
    references: References | None = None,
) -> Float[Array, ""]:
    """Supervised contrastive loss L_out (Khosla et al., NeurIPS 2020, Eq. 2).

    The mean over each image's positives of −log softmax(s/τ), where the softmax is over all other
    images and s is the cosine on the sphere, −distance / 2 in any space. The paper sums these over
    the images. Here the loss is their mean over the images with a positive. The released code also
    multiplies it by τ/0.07.

    Args:
        embeddings: Points of the space, as from `space.embed`.
        labels: Class of each image.
        space: Space that measures the distances.
        temperature: τ > 0.
        samples_per_class: See `contrastive`.
        references: See `contrastive`.

    Returns:
        The loss, a scalar.

    Raises:
        ValueError: See `contrastive`.
    """
    pairs = compare_images(space, embeddings, labels, samples_per_class, references)
    logits = -pairs.distances / (2 * temperature)
    total = log_sum_exp(logits, pairs.same | pairs.other)
    positives = jnp.sum(pairs.same, axis=1)
    mean = jnp.sum(logits, axis=1, where=pairs.same) / jnp.maximum(positives, 1)
    return mean_where(total - mean, positives > 0)


def scalable_nca(
    embeddings: Float[ArrayLike, "n dim"],
    labels: Int[ArrayLike, " n"],
    *,
    space: Space = SPHERE,
    temperature: float = 0.05,
    samples_per_class: int | None = None,
    references: References | None = None,
) -> Float[Array, ""]:
    """Scalable neighbourhood component analysis within a batch (Wu et al., ECCV 2018, Eqs. 2 to 4).

    −log of the probability that a neighbour, drawn with softmax(s/τ) among all other images, is of
    the image's class, where s is the cosine on the sphere, −distance / 2 in any space. The loss is
    the mean over the images with a positive. The paper draws neighbours from a memory of all
    training images, which can be the `references`; by default they are those of the batch.

    Args:
        embeddings: Points of the space, as from `space.embed`.
        labels: Class of each image.
        space: Space that measures the distances.
        temperature: τ > 0.
        samples_per_class: See `contrastive`.
        references: See `contrastive`.

    Returns:
        The loss, a scalar.

    Raises:
        ValueError: See `contrastive`.
    """
    pairs = compare_images(space, embeddings, labels, samples_per_class, references)
    logits = -pairs.distances / (2 * temperature)
    positives = log_sum_exp(logits, pairs.same)
    # log((P + N)/P) as log(1 + N/P), which keeps its digits when it is small.
    losses = log1p_sum_exp(logits - positives[:, None], pairs.other, axis=1)
    return mean_where(losses, jnp.any(pairs.same, axis=1))
