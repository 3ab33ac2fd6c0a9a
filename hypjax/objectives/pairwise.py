"""Pairwise cross-entropy: the loss of Hyp-ViT and Sph-ViT, and, in a mixed space, of HypMix."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jax import lax
from jaxtyping import Array, Bool, Float

from hypjax.errors import UserError
from hypjax.fields import ABOVE_0, Field, at_least, each
from hypjax.geometry import Fused, PoincareBall, Space, Sphere
from hypjax.geometry.arithmetic import AnyArray, Scalar
from hypjax.objectives.base import Declaration, LossSettings, Metrics, Objective
from hypjax.objectives.comparisons import Labels, class_numbers, norms
from hypjax.types import Outputs


def pairwise_cross_entropy(
    embeddings: Float[AnyArray, "classes samples dim"] | Float[AnyArray, "images dim"],
    *,
    space: Space,
    temperature: Scalar,
    labels: Labels | None = None,
    samples_per_class: int | None = None,
) -> Float[Array, ""]:
    """Pairwise cross-entropy of a class-balanced batch (Hyp-ViT, Eq. 5).

    Sample k of every class forms subset k. For each ordered pair of subsets (i, j), i ≠ j, the
    images of subset i are anchors. An anchor's positive is the image of its class in j; its
    negatives are the rest of j, and all of i but the anchor itself. Its loss is the cross-entropy
    of the logits −distance / τ, by the space's distance; the smaller the `temperature` τ > 0, the
    more the nearest negatives weigh. Losses are averaged over anchors and summed over pairs of
    subsets. Distances of positives are computed by subtraction, so small ones keep their digits.

    Embeddings are points of the space, as from `space.embed`: [classes, samples, dim], or, with
    `labels`, [images, dim]; at least 2 classes and 2 samples. Labels number the classes in any
    order, with equally many images in each class. An image's subset is then the number of images of
    its class before it. Traced labels, as under `jit`, require `samples_per_class`, the number of
    images in each class; if they do not agree with it, the loss is NaN. Raises a `ValueError` if
    there is nothing to compare, or classes differ in size.

    Examples:
        >>> import numpy as np
        >>> from hypjax.geometry import PoincareBall
        >>> from hypjax.objectives import pairwise_cross_entropy
        >>> ball = PoincareBall(c=0.1, clip_radius=2.3)
        >>> features = np.array([[[2, 0], [2, 1]], [[0, 2], [1, 2.0]]])  # 2 classes × 2 images.
        >>> loss = pairwise_cross_entropy(ball.embed(features), space=ball, temperature=0.2)
        >>> print(f"{loss:.3f}")
        0.004
    """
    embeddings = jnp.asarray(embeddings)
    if embeddings.ndim != (3 if labels is None else 2):
        shape = "[classes, samples, dim]" if labels is None else "[images, dim]"
        raise ValueError(f"needs embeddings {shape}, got {embeddings.shape}")
    if labels is not None:
        grouped, balanced = _by_class(embeddings, labels, samples_per_class)
        loss = pairwise_cross_entropy(grouped, space=space, temperature=temperature)
        return jnp.where(balanced, loss, jnp.nan)
    classes, samples, _ = embeddings.shape
    if classes < 2 or samples < 2:
        raise ValueError(f"needs at least 2 classes and 2 samples, got {classes} and {samples}")
    points = rearrange(embeddings, "n k d -> (k n) d")  # Ordered by subset, then by class.
    return _cross_entropy(_logits(space, points, samples, temperature), samples)


def _by_class(
    embeddings: Float[Array, "images dim"], labels: Labels, samples: int | None
) -> tuple[Float[Array, "classes samples dim"], Bool[AnyArray, ""]]:
    """Groups a flat batch by class; also returns whether each class has `samples` images."""
    if np.shape(labels) != embeddings.shape[:1]:
        raise ValueError(f"needs a label per embedding {embeddings.shape}, got {np.shape(labels)}")
    labels = class_numbers(labels)
    if not isinstance(labels, jax.core.Tracer):
        sizes = np.unique(labels, return_counts=True)[1]
        samples = samples or int(sizes.max(initial=1))
        if np.any(sizes != samples):
            counts = f"{sizes.min()} to {sizes.max()}"
            raise ValueError(f"needs {samples} images in each class, got {counts}")
    if samples is None or samples < 2 or len(embeddings) % samples:
        rule = f"2 or more, and divide {len(embeddings)} images"
        raise ValueError(f"samples_per_class is {samples}; it must be {rule}")
    labels = jnp.asarray(labels)
    order = jnp.argsort(labels, stable=True)
    rows = labels[order].reshape(-1, samples)  # One class a row, if classes are balanced.
    balanced = jnp.all(rows == rows[:, :1]) & jnp.all(rows[1:, 0] != rows[:-1, 0])
    return embeddings[order].reshape(-1, samples, embeddings.shape[-1]), balanced


def _logits(
    space: Space, points: Float[Array, "images dim"], samples: int, temperature: Scalar
) -> Float[Array, "images images"]:
    """Logits −distance / temperature of all pairs of points, which are ordered by subset."""
    # Training pulls positives together, so their distances are computed by subtraction: from inner
    # products, small distances lose digits, and their gradients vanish.
    subsets = rearrange(points, "(k n) d -> k n d", k=samples)
    positives = space.distance(subsets[:, :, None], rearrange(subsets, "k n d -> n k d"))
    distances = space.distance_matrix(points, points)
    blocks = rearrange(distances, "(i a) (j b) -> i a j b", i=samples, j=samples)
    same_class = jnp.eye(blocks.shape[-1], dtype=bool)[:, None]
    distances = jnp.where(same_class, positives[..., None], blocks)
    return -rearrange(distances, "i a j b -> (i a) (j b)") / temperature


def _cross_entropy(logits: Float[Array, "images images"], samples: int) -> Float[Array, ""]:
    """Loss from a batch's logits, whose rows and columns are ordered by subset."""
    # Written as log(1 + Σ exp(negative − positive)), small losses and gradients keep their digits.
    # Blocks stay where they are in the matrix: transposing them would take twice as long.
    blocks = rearrange(logits, "(i a) (j b) -> i a j b", i=samples, j=samples)
    negatives, positives = jax.vmap(jax.vmap(_block_terms, in_axes=1))(blocks)
    own_subset = jnp.diagonal(negatives).T[:, None]  # Negatives of block (i, i).
    losses = jnp.mean(jax.nn.softplus(jnp.logaddexp(negatives, own_subset) - positives), axis=-1)
    return jnp.sum(losses, where=~jnp.eye(samples, dtype=bool))


def _block_terms(logits: Float[Array, "n n"]) -> tuple[Float[Array, " n"], Float[Array, " n"]]:
    """For each anchor of a block, log-sum-exp over the other classes, and the positive's logit."""
    same_class = jnp.eye(logits.shape[0], dtype=bool)
    negatives = jax.nn.logsumexp(logits, axis=-1, where=~same_class)
    return negatives, jnp.sum(logits, axis=-1, where=same_class)


@dataclasses.dataclass(frozen=True)
class PairwiseCrossEntropy(Objective):
    """Objective of Hyp-ViT (in a `PoincareBall`) and Sph-ViT (on the `Sphere`)."""

    space: Space
    temperature: Scalar
    samples_per_class: int  # 0 until fitted to the images.
    # Factor of the sum over pairs of subsets, see `pairwise_cross_entropy`.
    pair_weight: float = 1.0
    # Weights of losses in the parts of the space, which are summed; () for one loss in the space.
    loss_weights: tuple[float, ...] = ()

    def loss(self, outputs: Outputs) -> tuple[Float[Array, ""], Metrics]:
        """Loss of a batch whose images are grouped by class, see `Objective.loss`."""
        features = rearrange(outputs.projected, "(n k) d -> n k d", k=self.samples_per_class)
        points = rearrange(self.space.embed(features), "n k d -> (k n) d")
        logits = _logits(self.space, points, self.samples_per_class, self.temperature)
        loss = _cross_entropy(logits, self.samples_per_class)
        if self.loss_weights:
            loss = self._sum_over_parts(points)
        metrics = _metrics(self.space, features, points, logits)
        if self.pair_weight != 1:
            loss *= self.pair_weight
            metrics["chance_loss"] *= self.pair_weight
        if self.loss_weights:
            metrics["chance_loss"] *= sum(self.loss_weights)
        return loss, metrics

    def _sum_over_parts(self, points: Float[Array, "images dim"]) -> Float[Array, ""]:
        """Sums the losses in each part of the space, times `loss_weights`."""
        samples = self.samples_per_class
        parts = zip(self.space.parts, self.space.split(points), self.loss_weights, strict=True)
        total: Array | float = 0.0
        for (part, weight), coordinates, loss_weight in parts:
            logits = weight * _logits(part, coordinates, samples, self.temperature)
            total += loss_weight * _cross_entropy(logits, samples)
        return jnp.asarray(total)


def _create(settings: LossSettings, space: Space) -> PairwiseCrossEntropy:
    fields, samples = settings.fields, settings.samples_per_class or 0
    weights = tuple(fields["loss_weights"])
    count = len(space.parts)
    if weights and len(weights) != count:
        advice = f"give one number for each part of objective.space ({count}), or ()"
        raise UserError(f"config.objective.loss_weights has {len(weights)} numbers; {advice}")
    return PairwiseCrossEntropy(
        space, fields["temperature"], samples, fields["pair_weight"], weights
    )


def _metrics(
    space: Space,
    features: Float[Array, "classes samples dim"],
    points: Float[Array, "images coordinates"],
    logits: Float[Array, "images images"],
) -> Metrics:
    """Norms, the recall within the batch, the range of logits and the loss at chance."""
    features, points, logits = lax.stop_gradient((features, points, logits))
    n, s = features.shape[:2]  # Classes, and samples of each.
    blocks = rearrange(logits, "(i a) (j b) -> i a j b", a=n, b=n)
    same_class_logits = jnp.diagonal(blocks, axis1=1, axis2=3)  # [i, j, a]
    other_sample = ~jnp.eye(s, dtype=bool)[..., None]
    nearest_positive = jnp.max(same_class_logits, axis=1, where=other_sample, initial=-jnp.inf)
    nearest_positive = nearest_positive.reshape(-1)
    classes = jnp.arange(len(points)) % n
    negatives = jnp.where(classes[:, None] != classes[None], logits, -jnp.inf)
    nearest_negative = jnp.max(negatives, axis=-1)
    # The minimum is taken over the negatives, which are already in memory, unlike the logits.
    least = jnp.min(negatives, where=negatives > -jnp.inf, initial=jnp.inf)
    return {
        # If all points coincide, logits are equal.
        "chance_loss": jnp.float32(s * (s - 1) * math.log(2 * n - 1)),
        **norms(space, features, points),
        "logit_min": jnp.minimum(least, jnp.min(same_class_logits)),
        "logit_max": jnp.max(jnp.maximum(nearest_positive, nearest_negative)),
        "batch_recall@1": jnp.mean(nearest_positive > nearest_negative),
    }


_HYPMIX = {
    # Eq. 10 has one temperature, the released code has two; these are the code's.
    "sphere_temperature": Field(0.05, ABOVE_0, learnable=True),  # τ_e: divides the cosine.
    "ball_temperature": Field(0.2, ABOVE_0, learnable=True),  # τ_h: divides the ball's distance.
    "ball_weight": Field(3.0, at_least(0), learnable=True),  # λ: 3 for CUB, 8 for Cars and SOP.
}


def mixed_space(
    ball: PoincareBall, *, sphere_temperature: Scalar, ball_temperature: Scalar, ball_weight: Scalar
) -> Fused:
    """Space in which the pairwise cross-entropy at temperature 1 is HypMix's loss.

    The logits are cos/τ_e − λ·d/τ_h, up to a constant (Eqs. 9 and 10), where d is the distance in
    the ball. Features are normalised, so the ball never clips them. `sphere_temperature` is τ_e,
    `ball_temperature` τ_h, and `ball_weight` λ.
    """
    sphere_part = Sphere(), 1 / (2 * sphere_temperature)  # −(2 − 2cos)/(2·τ_e).
    return Fused((sphere_part, (ball, ball_weight / ball_temperature)))


@dataclasses.dataclass(frozen=True)
class HypMix(Objective):
    """Pairwise cross-entropy in a `mixed_space`, whose docstring explains the fields."""

    ball: PoincareBall
    sphere_temperature: Scalar
    ball_temperature: Scalar
    ball_weight: Scalar
    samples_per_class: int

    @property
    def space(self) -> Fused:  # type: ignore[override]
        """Space in which the head's outputs are trained and scored."""
        return mixed_space(
            self.ball,
            sphere_temperature=self.sphere_temperature,
            ball_temperature=self.ball_temperature,
            ball_weight=self.ball_weight,
        )

    def loss(self, outputs: Outputs) -> tuple[Float[Array, ""], Metrics]:
        """Loss of a batch whose images are grouped by class, see `Objective.loss`."""
        return PairwiseCrossEntropy(self.space, 1.0, self.samples_per_class).loss(outputs)


def _create_hypmix(settings: LossSettings, space: Space) -> HypMix:
    assert isinstance(space, PoincareBall)  # As the declaration says.
    sphere_temperature, ball_temperature, ball_weight = (settings.fields[name] for name in _HYPMIX)
    samples = settings.samples_per_class or 0
    return HypMix(space, sphere_temperature, ball_temperature, ball_weight, samples)


PAIRWISE_LOSSES = {
    "pairwise_cross_entropy": Declaration(
        _create,
        # The temperature divides distances. Ball: paper and code of Hyp-ViT. Sphere: published runs
        # use cos / 0.1; the logits −D / 0.2, with D = 2 − 2cos (Eq. 4), differ by a constant, which
        # the softmax cancels. (The paper's "τ = 0.1" contradicts its Eq. 4.)
        {
            "temperature": Field(0.2, ABOVE_0, learnable=True),
            # Factor of the sum over pairs of subsets; HIER's code divides it by samples².
            "pair_weight": Field(1.0, ABOVE_0),
            # Weights of the losses in each part of a fused space (HypMix: λ and 1 − λ), which are
            # summed. (): one loss, of the parts' summed distances.
            "loss_weights": Field((), each(at_least(0).holds, "numbers of 0 or more"), kind=float),
        },
        by_class=True,
        divisor=lambda fields: fields["temperature"],
        reference="Hyp-ViT (Ermolov et al., CVPR 2022)",
    ),
    "hypmix": Declaration(
        _create_hypmix,
        _HYPMIX,
        by_class=True,
        spaces=("poincare",),
        one_ball=True,
        divisor=lambda fields: 1.0,  # The space's weights include the temperatures.
        reference="HypMix (Yue et al., WACV 2024); λ is 8 for Cars and SOP",
    ),
}


def negative_weights(
    distances: Float[AnyArray, "anchors items"],
    positives: Bool[AnyArray, "anchors items"],
    negatives: Bool[AnyArray, "anchors items"],
    *,
    temperature: Scalar,
) -> Float[Array, "anchors items"]:
    """Weights p(x⁻) of negatives in the gradient of an anchor's loss (HypMix, Eqs. 8, 9 and 11).

    p(x⁻) = exp(−d(a, x⁻)/τ) / [exp(−d(a, x⁺)/τ) + Σ exp(−d(a, x)/τ)], where x runs over the
    negatives of the anchor a. This is the derivative of the loss of a and its positive x⁺ by
    −d(a, x⁻)/τ, so an anchor's weights sum to 1 − p(x⁺). Several positives give the mean of their
    weights. Items that are not negatives have the weight 0.

    `distances` are measured in the loss's space (for HypMix, `mixed_space`); `temperature` is
    τ > 0, see `softmax_temperature`. Each anchor needs a positive and a negative.
    """
    logits = -jnp.asarray(distances) / temperature
    negatives = jnp.asarray(negatives)
    total = jax.nn.logsumexp(logits, axis=-1, keepdims=True, where=negatives)
    # Sum of an anchor's weights: 1 − p(x⁺), averaged over positives.
    weight_sum = jnp.mean(jax.nn.sigmoid(total - logits), axis=-1, keepdims=True, where=positives)
    return weight_sum * jnp.exp(jnp.where(negatives, logits - total, -jnp.inf))
