"""Losses of images and texts: CLIP, SigLIP, MERU, HyCoCLIP, PHyCLIP and UNCHA.

Pure functions of the points of a global batch, [n, d], in which row i of the images and row i of
the texts are a pair. Points lie on the hyperboloid, as in `hypjax.geometry.lorentz`. A number c is
its curvature −c. A vector of f curvatures makes f hyperboloids of d/f coordinates each, whose mean
distance is the points' (PHyCLIP). All is computed in float32, or in float64 if an input is.

Sources: Radford et al. (CLIP, ICML 2021), Figure 3; Zhai et al. (SigLIP, ICCV 2023), Eq. 1; Desai
et al. (MERU, ICML 2023), Section 3; Pal et al. (HyCoCLIP, ICLR 2025), Section 3; PHyCLIP (ICLR
2026); UNCHA (CVPR 2026), whose total is that of the released code.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from hypjax.geometry import arithmetic, cones, lorentz
from hypjax.geometry.arithmetic import AnyArray, Cols, Matrix, Rows, Scalar
from hypjax.objectives.comparisons import mean_where

Curvatures = Scalar | Float[AnyArray, " factors"]
Logits = Float[AnyArray, "n m"]
Positives = Bool[AnyArray, "n m"]
# Of the learned scalars in all of these models, see `hypjax.geometry.learned.within_bounds`. A
# scale multiplies distances or cosines; alphas multiply the features of images and texts.
BOUNDS = {"scale": (1e-3, 100.0), "c": (0.1, 10.0), "alpha": (1e-6, 1.0)}
TEXT_CONE, BOX_CONE, _SLOPE = 0.7, 1.2, 0.1  # η of texts' and boxes' cones, and UNCHA's slope.


def distances(x: Rows, y: Cols, c: Curvatures) -> Matrix:
    """Distances of all pairs; with several curvatures, the mean over factors (PHyCLIP).

    Far points are compared by subtraction, and others by a faster product, as in `Lorentz`.
    """
    x, y = arithmetic.floating(x, y)

    @jax.checkpoint  # For 64 factors of 768 points, the gradient would hold 8 GB instead of 0.6.
    def in_factor(factor: tuple[Array, Array, Array]) -> Array:
        a, b, curvature = factor
        norms = (curvature * arithmetic.square_norm(z) for z in (a, b))
        far = jnp.maximum(*map(jnp.max, norms)) > jnp.sinh(5.0) ** 2
        return lorentz.dist_matrix(a, b, curvature, subtract=far)

    return jnp.mean(lax.map(in_factor, _factors(x, y, c=c)), axis=0)


def _factors(*points: Array, c: Curvatures) -> tuple[Array, ...]:
    """Points by factor, [f, n, d/f], and curvatures [f]."""
    curvatures = jnp.atleast_1d(jnp.asarray(c, points[0].dtype))
    split = (x.reshape(len(x), len(curvatures), -1).swapaxes(0, 1) for x in points)
    return *split, curvatures


def pair_entailment(
    apexes: Rows, inner: Rows, c: Curvatures, *, eta: float = 1.0, slope: float = 0.0
) -> Float[Array, " n"]:
    """Entailment of pairs: max(0, φ − ηω) + slope·φ, in radians (MERU, Section 3).

    φ is the exterior angle of an inner point at its apex, and ω the half-aperture of the apex's
    cone, of K = 0.1. HyCoCLIP scales ω by η; UNCHA adds 0.1·φ, which pulls points inside a cone to
    its axis. With several curvatures, the result is the mean over factors.
    """
    apexes, inner = arithmetic.floating(apexes, inner)

    def in_factor(apex: Array, point: Array, curvature: Array) -> Array:
        angle = cones.exterior_angle(apex, point, curvature)
        return jax.nn.relu(angle - eta * cones.half_aperture(apex, curvature)) + slope * angle

    return jnp.mean(jax.vmap(in_factor)(*_factors(apexes, inner, c=c)), axis=0)


def cross_entropy(
    logits: Logits, positives: Positives | None = None, rows: Bool[AnyArray, " n"] | None = None
) -> Float[Array, ""]:
    """Mean cross-entropy of rows, or only of some, whose targets are on the diagonal.

    `positives` marks the targets instead, of which each row needs one or more: the own text, other
    captions of the image, and equal texts of other images. A row's loss is the mean over its
    targets, each among the row's other items that are no targets.
    """
    (logits,) = arithmetic.floating(logits)
    targets = _targets(logits, positives)
    lowest = jnp.finfo(logits.dtype).min / 4  # −∞ would have no gradient in a row of targets only.
    others = jax.nn.logsumexp(jnp.where(targets, lowest, logits), axis=1, keepdims=True)
    losses = jnp.sum(jax.nn.softplus(others - logits), axis=1, where=targets)
    losses /= jnp.sum(targets, axis=1, dtype=losses.dtype)
    return jnp.mean(losses) if rows is None else mean_where(losses, jnp.asarray(rows))


def _targets(logits: Float[Array, "n m"], positives: Positives | None) -> Bool[Array, "n m"]:
    rows, columns = logits.shape
    return jnp.eye(rows, columns, dtype=bool) if positives is None else jnp.asarray(positives)


def contrastive_loss(logits: Logits, positives: Positives | None = None) -> Float[Array, ""]:
    """½ (CE(image → texts) + CE(text → images)) of logits, whose rows are images (CLIP, Figure 3).

    CLIP's logits are scale·cos, and the hyperbolic models' −scale·`distances`.
    """
    logits = jnp.asarray(logits)
    columns = None if positives is None else positives.T
    return (cross_entropy(logits, positives) + cross_entropy(logits.T, columns)) / 2


def sigmoid_loss(logits: Logits, positives: Positives | None = None) -> Float[Array, ""]:
    """−1/n Σ log σ(z·logits) with z = 1 for pairs and −1 for others (SigLIP, Eq. 1).

    Logits are scale·cos + bias.
    """
    (logits,) = arithmetic.floating(logits)
    signed = jnp.where(_targets(logits, positives), logits, -logits)
    return -jnp.sum(jax.nn.log_sigmoid(signed)) / len(logits)


def meru_loss(
    images: Rows,
    texts: Rows,
    *,
    c: Curvatures,
    scale: Scalar,
    positives: Positives | None = None,
    weight: float = 0.2,
) -> Float[Array, ""]:
    """Contrastive loss, plus the weighted entailment of images in their texts' cones (MERU)."""
    contrastive = contrastive_loss(-scale * distances(images, texts, c), positives)
    return contrastive + weight * jnp.mean(pair_entailment(texts, images, c))


def hycoclip_loss(
    images: Rows,
    texts: Rows,
    box_images: Rows,
    box_texts: Rows,
    *,
    c: Curvatures,
    scale: Scalar,
    positives: Positives | None = None,
    weight: float = 0.2,
) -> Float[Array, ""]:
    """HyCoCLIP's loss of images, texts, and a box of each; with several curvatures, PHyCLIP's.

    A box is a part of an image, with words for it. It is more general than the whole, so its cone
    holds the whole. The loss is ¼ of four cross-entropies, in which boxes are queries only, plus
    weight·½ of four entailments.
    """
    whole = contrastive_loss(-scale * distances(images, texts, c), positives)
    by_box_image = cross_entropy(-scale * distances(box_images, texts, c), positives)
    columns = None if positives is None else positives.T
    by_box_text = cross_entropy(-scale * distances(box_texts, images, c), columns)
    entailed = (
        pair_entailment(texts, images, c, eta=TEXT_CONE)
        + pair_entailment(box_texts, box_images, c, eta=TEXT_CONE)
        + pair_entailment(box_images, images, c, eta=BOX_CONE)
        + pair_entailment(box_texts, texts, c, eta=BOX_CONE)
    )
    return whole / 2 + (by_box_image + by_box_text) / 4 + weight / 2 * jnp.mean(entailed)


def uncha_loss(
    images: Rows,
    texts: Rows,
    box_images: Float[AnyArray, "boxes d"],
    box_texts: Float[AnyArray, "boxes d"],
    owners: Int[AnyArray, " boxes"],
    *,
    c: Scalar,
    scales: tuple[Scalar, Scalar, Scalar],
    weight: float = 0.2,
) -> Float[Array, ""]:
    """UNCHA's loss of images, texts, and any number of boxes, each of a row in `owners`.

    `scales` are those of wholes among wholes, of boxes among boxes, and of boxes that search their
    whole in the other modality, where it is listed once for each box. Logits of the last are less
    sharp for boxes of large uncertainty u, which lie near the origin.
    """
    box_images, box_texts = arithmetic.floating(box_images, box_texts)
    loss = contrastive_loss(-scales[0] * distances(images, texts, c))
    loss += contrastive_loss(-scales[1] * distances(box_images, box_texts, c))
    entailed = pair_entailment(texts, images, c, eta=TEXT_CONE, slope=_SLOPE).mean() / 2
    entailed += pair_entailment(box_texts, box_images, c, eta=TEXT_CONE, slope=_SLOPE).mean() / 2
    for boxes, wholes, others in ((box_images, images, texts), (box_texts, texts, images)):
        u = jax.nn.softplus(-arithmetic.sqrt(arithmetic.square_norm(boxes)))  # 0.7 at the origin.
        scale = scales[2] * lax.stop_gradient(jnp.exp(-u / 2))
        logits = -scale * jnp.take(distances(boxes, others, c), owners, axis=1)
        entailment = pair_entailment(
            boxes, jnp.take(wholes, owners, 0), c, eta=BOX_CONE, slope=_SLOPE
        )
        loss += cross_entropy(logits) / 2
        # The entailment, without gradient, calibrates u: it is to grow with the uncertainty.
        errors = lax.stop_gradient(entailment) / (jnp.exp(u[:, 0]) + 1e-6)
        entropy = -jnp.sum(jax.nn.softmax(u, axis=0) * jax.nn.log_softmax(u, axis=0))
        entailed += entailment.mean() / 4 + 10 * (jnp.mean(errors + u[:, 0]) / 2 + entropy)
    return loss + weight * entailed
