"""Distances, masks, sums and metrics shared by the losses of pairs and proxies."""

from collections.abc import Sequence
from typing import NamedTuple, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from hypjax.geometry import Space, Sphere
from hypjax.geometry.arithmetic import AnyArray
from hypjax.objectives.base import Metrics

SPHERE = Sphere()
Embeddings = Float[AnyArray, "n dim"]  # Points of a space.
Labels = Int[AnyArray, " n"] | Sequence[int]  # Class numbers of up to 32 bits.


def similarity(distance: Float[Array, "*b"]) -> Float[Array, "*b"]:
    """1 − distance / 2: the cosine on the sphere, whose distance is 2 − 2cos.

    Losses published for the cosine use this similarity in every space. Margins of it are half as
    large as margins of the distance. It is linear, so its gradient does not vanish at distant
    points.
    """
    return 1 - distance / 2


class References(NamedTuple):
    """Points that the images of a batch are compared with, instead of with each other."""

    points: Float[Array, "m dim"]
    labels: Int[Array, " m"]  # −1 for points that do not count.
    own_rows: Int[Array, " n"] | None = None  # Each image's own reference, not compared.


class Pairs(NamedTuple):
    """All pairs of an image of a batch and an image or reference."""

    distances: Float[Array, "n m"]
    same: Bool[Array, "n m"]  # Marks pairs of one class.
    other: Bool[Array, "n m"]  # Marks pairs of different classes.


class Options(TypedDict, total=False):
    """Options of `compare_images` that all losses of pairs have."""

    space: Space
    samples_per_class: int | None
    references: References | None


def compare_images(
    points: Embeddings,
    labels: Labels,
    *,
    space: Space = SPHERE,
    samples_per_class: int | None = None,
    references: References | None = None,
) -> Pairs:
    """Compares the images of a batch with each other, or with references.

    Distances among each `samples_per_class` adjacent images, which share a class, are computed by
    subtraction: from inner products, small distances lose digits, and their gradients vanish.
    """
    points, labels = _batch(points, labels)
    if references is not None:
        distances = space.distance_matrix(points, references.points)
        same = labels[:, None] == references.labels[None].astype(jnp.int32)
        other = ~same & (references.labels >= 0)[None]
        if references.own_rows is not None:
            rows = jnp.arange(len(references.labels), dtype=references.own_rows.dtype)
            same &= references.own_rows[:, None] != rows[None]
        return Pairs(distances, same, other)
    distances = space.distance_matrix(points, points)
    if samples_per_class is not None:
        distances = _with_subtracted_blocks(space, points, distances, samples_per_class)
    same_class = labels[:, None] == labels[None]
    return Pairs(distances, same_class & ~jnp.eye(len(points), dtype=bool), ~same_class)


def compare_proxies(
    space: Space,
    points: Embeddings,
    labels: Labels,
    proxies: Float[AnyArray, "classes centres dim"],
) -> tuple[Float[Array, "n classes centres"], Bool[Array, "n classes"]]:
    """Distances from images to the proxies of all classes, and a mask of each image's class.

    Distances to the image's class, which training makes small, are computed by subtraction.
    """
    proxies = jnp.asarray(proxies)
    classes, centres, dim = proxies.shape
    points, labels = _batch(points, class_indices(labels, classes))
    distances = space.distance_matrix(points, proxies.reshape(classes * centres, dim))
    same = labels[:, None] == jnp.arange(classes, dtype=jnp.int32)[None]
    subtracted = space.distance(points[:, None], proxies[labels])[:, None]
    return jnp.where(same[..., None], subtracted, distances.reshape(-1, classes, centres)), same


def _batch(points: Embeddings, labels: Labels) -> tuple[Float[Array, "n dim"], Int[Array, " n"]]:
    points, labels = jnp.asarray(points), jnp.asarray(class_numbers(labels), jnp.int32)
    if points.ndim != 2 or labels.shape != points.shape[:1]:
        raise ValueError(f"needs a label per embedding {points.shape}, got {labels.shape}")
    return points, labels


def class_numbers(labels: Labels) -> Int[AnyArray, " n"]:
    """Converts labels, unless traced, to a NumPy array.

    Raises a `ValueError` unless they are a vector of one or more 32-bit integers.
    """
    labels = labels if isinstance(labels, jax.core.Tracer) else np.asarray(labels)
    if labels.ndim != 1 or not labels.size:
        raise ValueError(f"needs a label per embedding, and one or more, got {labels.shape}")
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise ValueError(f"labels have dtype {labels.dtype}; number the classes by integers")
    if isinstance(labels, np.ndarray) and not np.array_equal(labels, labels.astype(np.int32)):
        raise ValueError("labels exceed 32 bits; number the classes from 0")
    return labels


def class_indices(labels: Labels, classes: int) -> Int[AnyArray, " n"]:
    """Converts labels by `class_numbers`; a `ValueError` unless traced or 0 to `classes` − 1."""
    labels = class_numbers(labels)
    if isinstance(labels, jax.core.Tracer):
        return labels
    if wrong := set(labels.tolist()).difference(range(classes)):
        raise ValueError(f"{classes} classes are numbered from 0, but a label is {min(wrong)}")
    return labels


def _with_subtracted_blocks(
    space: Space, points: Float[Array, "n dim"], distances: Float[Array, "n n"], size: int
) -> Float[Array, "n n"]:
    """Recomputes the distances within groups of `size` adjacent images by subtraction."""
    if size < 1 or len(points) % size:
        raise ValueError(f"samples_per_class is {size}; it must divide {len(points)} images")
    groups = points.reshape(-1, size, points.shape[-1])
    subtracted = space.distance(groups[:, :, None], groups[:, None])
    blocks = distances.reshape(len(groups), size, len(groups), size)
    same_group = jnp.eye(len(groups), dtype=bool)[:, None, :, None]
    return jnp.where(same_group, subtracted[:, :, None], blocks).reshape(distances.shape)


def log1p_sum_exp(
    x: Float[Array, "n m"], where: Bool[Array, "n m"], axis: int
) -> Float[Array, " k"]:
    """log(1 + Σ exp(x)) over selected elements; if none is selected, 0 with gradient 0."""
    x = jnp.where(where, x, -jnp.inf)
    shift = lax.stop_gradient(jnp.max(x, axis=axis, keepdims=True, initial=0))
    total = jnp.sum(jnp.exp(x - shift), axis=axis)
    shift = jnp.squeeze(shift, axis)
    return shift + jnp.log1p(total + jnp.expm1(-shift))


def log_sum_exp(x: Float[Array, "n m"], where: Bool[Array, "n m"]) -> Float[Array, " n"]:
    """Log-sum-exp over each row's selected elements; over the whole row if none is selected."""
    has_selected = jnp.any(where, axis=-1, keepdims=True)
    return jax.nn.logsumexp(x, axis=-1, where=where | ~has_selected)


def mean_where(
    values: Float[Array, "*b"] | Bool[Array, "*b"], where: Bool[Array, "*b"]
) -> Float[Array, ""]:
    """Mean of selected elements; 0 if none is selected."""
    total = jnp.sum(values, where=where)
    return total / jnp.maximum(jnp.sum(where), 1).astype(total.dtype)


def norms(
    space: Space, features: Float[Array, "*b dim"], points: Float[Array, "*n coordinates"]
) -> Metrics:
    """Mean norms of the head's outputs and of their points, and the share of clipped outputs."""
    return {
        "feature_norm": jnp.mean(jnp.linalg.norm(features, axis=-1)),
        "embedding_norm": jnp.mean(jnp.linalg.norm(points, axis=-1)),
        "clipped_share": jnp.mean(space.clipped(features)),
    }


def batch_metrics(
    features: Float[Array, "n dim"],
    points: Float[Array, "n coordinates"],
    labels: Int[Array, " n"],
    space: Space,
    samples_per_class: int | None,
) -> Metrics:
    """Computes `norms` and, unless `samples_per_class` is None, the recall within the batch.

    The recall is the share of images that are strictly nearer to an image of their class than to
    all images of other classes.
    """
    features, points = lax.stop_gradient((features, points))
    metrics = norms(space, features, points)
    if samples_per_class is not None:
        # A loss of pairs has already computed these distances; XLA merges equal expressions.
        pairs = compare_images(points, labels, space=space, samples_per_class=samples_per_class)
        positive = jnp.min(pairs.distances, axis=1, where=pairs.same, initial=jnp.inf)
        negative = jnp.min(pairs.distances, axis=1, where=pairs.other, initial=jnp.inf)
        metrics["batch_recall@1"] = jnp.mean(positive < negative)
    return metrics
