"""Distances, masks, sums and metrics that the losses of pairs and of proxies share."""

import itertools
import numbers
from collections.abc import Sequence
from typing import Any, NamedTuple, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int, Shaped

from hypjax.geometry import Space, Sphere
from hypjax.objectives.base import Metrics

SPHERE = Sphere()
Embeddings = Float[ArrayLike, "n dim"]  # Points of a space.
# Numbers or strings; traced ones, as under `jit`, must be integers.
Labels = Shaped[ArrayLike, " n"] | Sequence[str]


def similarity(distance: Float[Array, "*b"]) -> Float[Array, "*b"]:
    """1 − distance / 2: the cosine on the sphere, whose distance is 2 − 2cos.

    Losses published for the cosine use it in every space: margins are then half as large as in
    terms of distances, and gradients do not vanish for distant points.
    """
    return 1 - distance / 2


class References(NamedTuple):
    """Points to compare the images of a batch with, instead of with each other."""

    points: Float[Array, "m dim"]
    labels: Int[Array, " m"]  # −1 for points that do not count.
    own: Int[Array, " n"] | None = None  # Row of each image's own point, which is left out.


class Pairs(NamedTuple):
    """All pairs of an image of a batch and an image or reference."""

    distances: Float[Array, "n m"]
    same: Bool[Array, "n m"]  # Pairs of one class,
    other: Bool[Array, "n m"]  # and of different classes.


class Compared(TypedDict, total=False):
    """How images are compared, in all losses of pairs: see `compare_images`."""

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

    Distances among every `samples_per_class` adjacent images, of one class, are computed by
    subtraction: from products, small distances lose digits and their gradients vanish.
    """
    points = _batch(points, labels)
    if references is not None:
        distances = space.distance_matrix(points, references.points)
        labels, others = map(jnp.asarray, class_numbers(labels, references.labels))
        same = labels[:, None] == others
        other = ~same & (others >= 0)
        if references.own is not None:
            same &= references.own[:, None] != jnp.arange(len(others))
        return Pairs(distances, same, other)
    labels = jnp.asarray(class_numbers(labels)[0])
    distances = space.distance_matrix(points, points)
    if samples_per_class is not None:
        distances = _with_subtracted_blocks(space, points, distances, samples_per_class)
    alike = labels[:, None] == labels
    return Pairs(distances, alike & ~jnp.eye(len(points), dtype=bool), ~alike)


def compare_proxies(
    space: Space,
    points: Embeddings,
    labels: Labels,
    proxies: Float[ArrayLike, "classes centres dim"],
) -> tuple[Float[Array, "n classes centres"], Bool[Array, "n classes"]]:
    """Distances from images to the proxies of all classes, and which class is an image's own.

    Distances to the own class are computed by subtraction, since training makes them small.
    """
    points, proxies = _batch(points, labels), jnp.asarray(proxies)
    classes, centres, dim = proxies.shape
    labels = jnp.asarray(class_indices(labels, classes))
    flat = space.distance_matrix(points, proxies.reshape(classes * centres, dim))
    own = labels[:, None] == jnp.arange(classes)
    exact = space.distance(points[:, None], proxies[labels])[:, None]
    distances = jnp.where(own[..., None], exact, flat.reshape(-1, classes, centres))
    return distances, own


def _batch(points: Embeddings, labels: Labels) -> Float[Array, "n dim"]:
    points = jnp.asarray(points)
    if points.ndim != 2 or np.shape(labels) != points.shape[:1]:
        raise ValueError(f"{np.shape(labels)} is not one label for each image of {points.shape}")
    return points


def class_numbers(*labels: Labels) -> list[Int[ArrayLike, " n"]]:
    """Numbers the classes of several arrays of labels: equal labels get equal numbers; −1 stays.

    Labels are compared on the host, since devices wrap integers of 64 bits and round floats. If any
    array is traced, all must hold integers of 32 bits, which stay as they are.
    """
    if any(isinstance(array, jax.core.Tracer) for array in labels):
        return [integer_labels(array) for array in labels]
    values = [_values(array) for array in labels]
    classes = {-1: -1}
    for label in itertools.chain(*values):
        classes.setdefault(label, len(classes) - 1)
    return [np.array([classes[label] for label in array], np.int32) for array in values]


def class_indices(labels: Labels, classes: int) -> Int[ArrayLike, " n"]:
    """Labels that number `classes` classes from 0, as integers."""
    if isinstance(labels, jax.core.Tracer):
        return integer_labels(labels)
    values = _values(labels)
    for label in values:
        if label not in range(classes):  # 3.0 is, 2.5 is not.
            raise ValueError(f"{classes} classes are numbered from 0, but a label is {label!r}")
    return np.array(values, np.int32)


def integer_labels(labels: Labels) -> Int[ArrayLike, " n"]:
    """Checks labels that are traced, or compared with traced ones, and so are not numbered."""
    traced = isinstance(labels, jax.core.Tracer)
    labels = labels if traced else np.asarray(labels)
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise ValueError(f"labels have dtype {labels.dtype}; under jit they must be integers")
    if not traced and np.any(labels != labels.astype(np.int32)):
        raise ValueError("labels exceed 32 bits; number the classes from 0")
    return labels


def _values(labels: Labels) -> list[Any]:
    """Labels as Python's numbers and strings, which compare exactly; refuses missing ones."""
    if hasattr(labels, "dtype"):
        values = np.asarray(labels).tolist()
    else:  # One by one: an array of a string and NaN would hold the string "nan".
        values = [np.asarray(label).item() for label in labels]
    for row, label in enumerate(values):
        if not isinstance(label, str | bytes | numbers.Real) or label != label:
            raise ValueError(f"label {row} is {label!r}; each image needs a number or a string")
    return values


def _with_subtracted_blocks(
    space: Space, points: Float[Array, "n dim"], distances: Float[Array, "n n"], size: int
) -> Float[Array, "n n"]:
    if size < 1 or len(points) % size:
        raise ValueError(f"samples_per_class is {size}, for {len(points)} images")
    groups = points.reshape(-1, size, points.shape[-1])
    within = space.distance(groups[:, :, None], groups[:, None])
    blocks = distances.reshape(len(groups), size, len(groups), size)
    itself = jnp.eye(len(groups), dtype=bool)[:, None, :, None]
    return jnp.where(itself, within[:, :, None], blocks).reshape(distances.shape)


def log1p_sum_exp(
    x: Float[Array, "n m"], where: Bool[Array, "n m"], axis: int
) -> Float[Array, " k"]:
    """log(1 + Σ exp(x)) over chosen elements; 0, with gradient 0, where there are none."""
    x = jnp.where(where, x, -jnp.inf)
    shift = lax.stop_gradient(jnp.max(x, axis=axis, keepdims=True, initial=0))
    total = jnp.sum(jnp.exp(x - shift), axis=axis)
    shift = jnp.squeeze(shift, axis)
    return shift + jnp.log1p(total + jnp.expm1(-shift))


def log_sum_exp(x: Float[Array, "n m"], where: Bool[Array, "n m"]) -> Float[Array, " n"]:
    """Log-sum-exp over chosen elements of each row; over all of a row where there are none."""
    some = jnp.any(where, axis=-1, keepdims=True)
    return jax.nn.logsumexp(x, axis=-1, where=where | ~some)


def mean_where(values: Float[Array, "*b"], where: Bool[Array, "*b"]) -> Float[Array, ""]:
    """Mean of chosen elements; 0 if there are none."""
    return jnp.sum(values, where=where) / jnp.maximum(jnp.sum(where), 1)


def norms(
    space: Space, features: Float[Array, "*b dim"], points: Float[Array, "*b coordinates"]
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
    """`norms`, and the recall within the batch, unless `samples_per_class` is None.

    The recall is the share of images that are strictly nearer to an image of their class than to
    all images of other classes.
    """
    features, points = lax.stop_gradient((features, points))
    metrics = norms(space, features, points)
    if samples_per_class is not None:
        # A loss of pairs has computed these distances; XLA merges equal expressions.
        pairs = compare_images(points, labels, space=space, samples_per_class=samples_per_class)
        match = jnp.min(pairs.distances, axis=1, where=pairs.same, initial=jnp.inf)
        nearest = jnp.min(pairs.distances, axis=1, where=pairs.other, initial=jnp.inf)
        metrics["batch_recall@1"] = jnp.mean(match < nearest)
    return metrics
