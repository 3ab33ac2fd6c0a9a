"""Losses that compare the images of a batch with each other, or with a memory.

Losses use the distance of a space. On the sphere they are the published losses, which use the
cosine; in other spaces, `hypjax.objectives.comparisons.similarity` replaces the cosine. A batch may
hold any number of images of each class; sums over no pairs are 0. `contrastive` documents the
common arguments and errors.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Literal, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, PRNGKeyArray

from hypjax.errors import UserError
from hypjax.fields import ABOVE_0, ANY, Field, Rule, at_least, one_of, within
from hypjax.geometry import Space
from hypjax.geometry.arithmetic import AnyArray, Scalar
from hypjax.objectives.base import LossResult, LossSettings, Objective, ProblemSizes, declare
from hypjax.objectives.comparisons import (
    SPHERE,
    Embeddings,
    Labels,
    Options,
    Pairs,
    References,
    batch_metrics,
    class_numbers,
    compare_images,
    log1p_sum_exp,
    log_sum_exp,
    mean_where,
    similarity,
)
from hypjax.objectives.memory import empty_memory
from hypjax.types import Batch, Outputs


def contrastive(
    embeddings: Embeddings, labels: Labels, *, margin: float = 0.5, **options: Unpack[Options]
) -> Float[Array, ""]:
    """Contrastive loss, as in IRT (El-Nouby et al., 2021).

    (1/n) Σ_i [Σ_{same class} (1 − s_ij) + Σ_{other class} max(s_ij − β, 0)], over j ≠ i, where s is
    the cosine on the sphere and 1 − distance / 2 in other spaces. The sums grow with the batch.
    `margin` is β, the similarity above which images of different classes repel each other.

    Embeddings are points of `space`, as from `space.embed`. Labels are integers of up to 32 bits,
    the numbers of the classes. If each `samples_per_class` adjacent images share a class, their
    distances are computed by subtraction, which keeps the digits of small distances. With
    `references`, such as a memory, images are compared with these points instead of with each
    other. Raises a `ValueError` for other labels, and for a number of images that is not a multiple
    of `samples_per_class`.

    Examples:
        >>> import numpy as np
        >>> from hypjax.objectives import contrastive
        >>> points = np.array([[1, 0], [0.8, 0.6], [0, 1], [-0.6, 0.8]])  # Of the sphere.
        >>> print(f"{contrastive(points, [0, 0, 1, 1]):.3f}")
        0.250
    """
    pairs = compare_images(embeddings, labels, **options)
    attraction = pairs.distances / 2
    repulsion = jax.nn.relu(similarity(pairs.distances) - margin)
    losses = jnp.where(pairs.same, attraction, repulsion)  # One array: a memory makes it large.
    return jnp.sum(losses, where=pairs.same | pairs.other) / len(losses)


def multi_similarity(
    embeddings: Embeddings,
    labels: Labels,
    *,
    alpha: float = 2.0,
    beta: float = 50.0,
    base: float = 0.5,
    mining: bool = True,
    epsilon: float = 0.1,
    **options: Unpack[Options],
) -> Float[Array, ""]:
    """Multi-similarity loss (Wang et al., CVPR 2019, Eq. 15).

    (1/n) Σ_i [log(1 + Σ_{same class} exp(−α·(s_ij − λ)))/α + log(1 + Σ_{other class} exp(β·(s_ij −
    λ)))/β], over j ≠ i, where s is the cosine on the sphere and 1 − distance / 2 in other spaces.

    `alpha` is α > 0, `beta` β > 0, and `base` λ, the similarity that separates positives and
    negatives. With `mining`, an image's negatives count only if they are more similar to it than
    its least similar positive minus ε, and its positives only if they are less similar than its
    most similar negative plus ε (Eqs. 11 and 12). Images without positives or without negatives
    then have the loss 0.

    Examples:
        >>> import numpy as np
        >>> from hypjax.objectives import multi_similarity
        >>> points = np.array([[1, 0], [0.8, 0.6], [0, 1], [-0.6, 0.8]])  # Of the sphere.
        >>> print(f"{multi_similarity(points, [0, 1, 0, 1]):.3f}")
        0.957
    """
    pairs = compare_images(embeddings, labels, **options)
    positives, negatives = pairs.same, pairs.other
    s = similarity(pairs.distances)
    if mining:
        least_positive = jnp.min(s, axis=1, keepdims=True, where=positives, initial=jnp.inf)
        largest_negative = jnp.max(s, axis=1, keepdims=True, where=negatives, initial=-jnp.inf)
        # The negated comparisons keep NaN, which must reach the loss.
        positives &= ~(s - epsilon >= largest_negative)
        negatives &= ~(s + epsilon <= least_positive)
    pull = log1p_sum_exp(-alpha * (s - base), positives, axis=1) / alpha
    push = log1p_sum_exp(beta * (s - base), negatives, axis=1) / beta
    return jnp.mean(pull + push)


def circle(
    embeddings: Embeddings,
    labels: Labels,
    *,
    scale: float = 80.0,
    margin: float = 0.4,
    **options: Unpack[Options],
) -> Float[Array, ""]:
    """Circle loss of pairs (Sun et al., CVPR 2020, Eq. 6).

    log(1 + Σ_{other class} exp(γ·α_n·(s − m)) · Σ_{same class} exp(−γ·α_p·(s − 1 + m))), where s is
    the cosine on the sphere and 1 − distance / 2 in other spaces. The weights α_n = max(s + m, 0)
    and α_p = max(1 + m − s, 0) of Eq. 5 have no gradient; they enlarge the gradient of pairs that
    are far from their target. The loss is the mean over the images with a positive and a negative.
    For fine-grained retrieval, the paper's `scale` γ > 0 is 80 (128 for persons, 256 for faces),
    and its `margin` m is 0.4 (0.25 for persons and faces).

    Examples:
        >>> import numpy as np
        >>> from hypjax.objectives import circle
        >>> points = np.array([[1, 0], [0.8, 0.6], [0, 1], [-0.6, 0.8]])  # Of the sphere.
        >>> print(f"{circle(points, [0, 0, 1, 1]):.3f}")
        3.201
    """
    pairs = compare_images(embeddings, labels, **options)
    s = similarity(pairs.distances)
    fixed = lax.stop_gradient(s)
    pull = -scale * jax.nn.relu(1 + margin - fixed) * (s - 1 + margin)
    push = scale * jax.nn.relu(fixed + margin) * (s - margin)
    losses = jax.nn.softplus(log_sum_exp(pull, pairs.same) + log_sum_exp(push, pairs.other))
    return mean_where(losses, jnp.any(pairs.same, axis=1) & jnp.any(pairs.other, axis=1))


def supcon(
    embeddings: Embeddings, labels: Labels, *, temperature: Scalar = 0.1, **options: Unpack[Options]
) -> Float[Array, ""]:
    """Supervised contrastive loss L_out (Khosla et al., NeurIPS 2020, Eq. 2).

    An image's loss is the mean over its positives of −log softmax(s/τ), where the softmax is over
    all other images and s = −distance / 2 (on the sphere, the cosine up to a constant). The paper
    sums over images; here the loss is the mean over the images with a positive. The released code
    also multiplies it by τ/0.07.

    Examples:
        >>> import numpy as np
        >>> from hypjax.objectives import supcon
        >>> points = np.array([[1, 0], [0.8, 0.6], [0, 1], [-0.6, 0.8]])  # Of the sphere.
        >>> print(f"{supcon(points, [0, 0, 1, 1]):.3f}")
        0.064
    """
    pairs = compare_images(embeddings, labels, **options)
    logits = -pairs.distances / (2 * temperature)
    total = log_sum_exp(logits, pairs.same | pairs.other)
    positives = jnp.sum(pairs.same, axis=1)
    divisors = jnp.maximum(positives, 1).astype(logits.dtype)
    mean = jnp.sum(logits, axis=1, where=pairs.same) / divisors
    return mean_where(total - mean, positives > 0)


def scalable_nca(
    embeddings: Embeddings,
    labels: Labels,
    *,
    temperature: Scalar = 5e-2,
    **options: Unpack[Options],
) -> Float[Array, ""]:
    """Scalable neighbourhood component analysis within a batch (Wu et al., ECCV 2018, Eqs. 2 to 4).

    An image's loss is −log of the probability that a neighbour, drawn with softmax(s/τ) among all
    other images, has the image's class, where s = −distance / 2 (on the sphere, the cosine up to a
    constant). The loss is the mean over the images with a positive. Neighbours are drawn from the
    batch, or from the `references`. The paper draws them only from a memory of all training images,
    as a run does with `memory_only` and a memory of 1; without it, a run adds both losses.

    Examples:
        >>> import numpy as np
        >>> from hypjax.objectives import scalable_nca
        >>> points = np.array([[1, 0], [0.8, 0.6], [0, 1], [-0.6, 0.8]])  # Of the sphere.
        >>> print(f"{scalable_nca(points, [0, 0, 1, 1]):.3f}")
        0.009
    """
    pairs = compare_images(embeddings, labels, **options)
    logits = -pairs.distances / (2 * temperature)
    positives = log_sum_exp(logits, pairs.same)
    # Written as log(1 + N/P), log((P + N)/P) keeps its digits when it is small.
    losses = log1p_sum_exp(logits - positives[:, None], pairs.other, axis=1)
    return mean_where(losses, jnp.any(pairs.same, axis=1))


MININGS = ("hard", "semihard")


def triplet(
    embeddings: Embeddings,
    labels: Labels,
    *,
    margin: float = 0.2,
    mining: Literal["hard", "semihard"] = "hard",
    **options: Unpack[Options],
) -> Float[Array, ""]:
    """Triplet loss max(d_ap − d_an + margin, 0) of triplets chosen in the batch.

    `mining="hard"` takes the farthest positive and the nearest negative of each image (Hermans et
    al., 2017, Eq. 5); the loss is the mean over the images that have both. "semihard" takes all
    pairs of images of one class, each with the nearest negative that is farther than the positive
    (Schroff et al., CVPR 2015, Section 3.2); the loss is the mean over all these pairs, and 0 for
    pairs without a farther negative.

    On the sphere, distances are squared chords, as in Schroff et al.; Hermans et al. use Euclidean
    distances without normalisation.

    For semi-hard triplets with traced labels, as under `jit`, no class may have more images than
    `samples_per_class`. Raises a `ValueError` for another mining, or semi-hard mining with
    references.

    Examples:
        >>> import numpy as np
        >>> from hypjax.objectives import triplet
        >>> points = np.array([[1, 0], [0.8, 0.6], [0, 1], [-0.6, 0.8]])  # Of the sphere.
        >>> print(f"{triplet(points, [0, 1, 0, 1]):.3f}")
        1.800
    """
    if mining not in MININGS:
        raise ValueError(f"mining is {mining!r}; it must be one of {', '.join(MININGS)}")
    if mining != "hard" and options.get("references") is not None:
        raise ValueError(f"mining is {mining!r}; it must be 'hard' with references")
    pairs = compare_images(embeddings, labels, **options)
    if mining == "semihard":
        classes = class_numbers(labels)
        if isinstance(classes, jax.core.Tracer):  # Traced classes cannot be counted.
            max_samples = options.get("samples_per_class") or len(classes)
        else:
            max_samples = int(np.unique(classes, return_counts=True)[1].max())
        return _semihard(pairs, margin, max_samples)
    farthest = jnp.max(pairs.distances, axis=1, where=pairs.same, initial=-jnp.inf)
    nearest = jnp.min(pairs.distances, axis=1, where=pairs.other, initial=jnp.inf)
    has_triplet = jnp.any(pairs.same, axis=1) & jnp.any(pairs.other, axis=1)
    return mean_where(jax.nn.relu(farthest - nearest + margin), has_triplet)


def _semihard(pairs: Pairs, margin: float, max_samples: int) -> Float[Array, ""]:
    """Loss of the semi-hard triplets; no class has more than `max_samples` images."""
    # A pass over the distances for each of an image's positives is faster than sorting them.
    positives, _ = lax.top_k(jnp.where(pairs.same, pairs.distances, -jnp.inf), max_samples - 1)

    @jax.checkpoint
    def violation(positive: Float[Array, " n"]) -> Float[Array, " n"]:
        # The negated comparison keeps NaN, which must reach the loss.
        farther = pairs.other & ~(pairs.distances <= positive[:, None])
        nearest = jnp.min(pairs.distances, axis=1, where=farther, initial=jnp.inf)
        return jax.nn.relu(positive - nearest + margin)

    total = jnp.sum(lax.map(violation, positives.T))
    return total / jnp.maximum(jnp.sum(pairs.same), 1).astype(total.dtype)


def tuple_contrastive(
    embeddings: Float[AnyArray, "n dim"], *, size: int, space: Space = SPHERE, margin: float = 0.85
) -> Float[Array, ""]:
    """Contrastive loss of tuples (Radenović et al., TPAMI 2019, Eq. 7), as IRT trains on SfM-120k.

    Each `size` adjacent embeddings, points of the space, are a tuple: the anchor a, its positive p,
    and its negatives n. The loss is the mean over the tuples of ½ d(a, p)² + Σ_n ½ max(m − d(a, n),
    0)², where m is the `margin`. On the sphere d is the Euclidean distance, so the first term is
    1 − cos, the attraction of IRT's contrastive loss; in the ball d is the geodesic distance. The
    released code sums over its five tuples, which makes the loss five times as large in proportion
    to weight decay and other losses. The default margin is from the code on which IRT builds: IRT
    does not give one.
    """
    points = jnp.asarray(embeddings)
    if points.ndim != 2 or size < 3 or len(points) % size or not len(points):
        raise ValueError(f"needs tuples of {size} (3 or more) points, got {points.shape}")
    tuples = points.reshape(-1, size, points.shape[1])
    distances = space.length(space.distance(tuples[:, :1], tuples[:, 1:]))
    attraction = distances[:, 0] ** 2 / 2
    repulsion = jnp.sum(jax.nn.relu(margin - distances[:, 1:]) ** 2, axis=1) / 2
    return jnp.mean(attraction + repulsion)


_LEAST_DISTANCE = 1e-8  # Distance below which points do not repel each other in KoLeo.


def koleo(
    points: Float[AnyArray, "n dim"], *, space: Space = SPHERE, ids: Labels | None = None
) -> Float[Array, ""]:
    """KoLeo, −(1/n) Σ_i log min_{j≠i} d(i, j), an estimate of the differential entropy.

    From Sablayrolles et al. (ICLR 2019, Eq. 2) and IRT (El-Nouby et al., 2021), who use it on the
    sphere, where d is the Euclidean distance. In the ball d is the geodesic distance.

    The nearest point is found by inner products; its distance is computed by subtraction, which
    keeps the digits of small distances. In float32, another point may be taken for the nearest if
    their distances differ by less than about 1e-3. Distances below 1e-8 count as 1e-8, without a
    gradient. Fewer than two points are a `ValueError`.

    `ids` identify the image of each point, by default all different: an image that occurs twice in
    a batch, as a negative of two tuples, is not pushed away from itself.

    Examples:
        >>> import numpy as np
        >>> from hypjax.objectives import koleo
        >>> points = np.array([[1, 0], [0.8, 0.6], [0, 1], [-0.6, 0.8]])  # Of the sphere.
        >>> print(f"{koleo(points):.3f}")
        0.458
    """
    points = jnp.asarray(points)
    if len(points) < 2:
        raise ValueError(f"needs two points or more, got {len(points)}")
    fixed = lax.stop_gradient(points)
    ids = jnp.asarray(class_numbers(np.arange(len(points)) if ids is None else ids))
    itself = ids[:, None] == ids[None]
    nearest = jnp.argmin(jnp.where(itself, jnp.inf, space.distance_matrix(fixed, fixed)), axis=1)
    distances = space.distance(points, points[nearest])
    power = 2 if space.squared else 1
    return -jnp.mean(jnp.log(jnp.maximum(distances, _LEAST_DISTANCE**power))) / power


@dataclasses.dataclass(frozen=True)
class PairObjective(Objective):
    """The sum of a loss within a batch, the loss between batch and memory, and λ · KoLeo.

    IRT trains with this sum (El-Nouby et al., 2021). The batch enters the memory first. With
    `memory_only` and a teacher, `supcon` is the loss of MoCo (He et al., CVPR 2020): the memory is
    MoCo's queue, and the teacher's embeddings are its keys.

    An image is compared with its own row in the memory only if a teacher embedded the row and the
    loss within the batch is included.
    """

    space: Space
    function: Callable[..., Array]  # The loss, with its settings.
    samples_per_class: int | None  # None if images are not grouped by class.
    memory: float = 0.0  # Number of images, or, up to 1, their share of the training images.
    memory_decay: float = 0.0  # Decay of the teacher that embeds them; 0 for the trained model.
    memory_only: bool = False  # Whether to omit the loss within the batch (MoCo).
    koleo_weight: float = 0.0  # λ.

    lasting_state = ("memory",)
    teacher_decay = property(lambda self: self.memory_decay or None)

    def init(self, key: PRNGKeyArray, spec: ProblemSizes) -> tuple[dict, dict]:
        """Returns no parameters, and an empty memory unless `memory` is 0.

        Raises a `UserError` if the memory is smaller than a batch or larger than the training set.
        """
        if not self.memory:
            return {}, {}
        images = spec.training_images
        rows = round(self.memory * images) if self.memory <= 1 else int(self.memory)
        if not spec.batch_size <= rows <= images:
            rule = f"it must hold {spec.batch_size}, a batch, to {images}, the training set"
            held = f"config.objective.memory is {self.memory:g}, which holds {rows} images"
            raise UserError(f"{held}; {rule}")
        example = jax.ShapeDtypeStruct((1, spec.head_dim), jnp.float32)
        dim = jax.eval_shape(self.space.embed, example).shape[-1]
        return {}, {"memory": empty_memory(rows, dim)}

    def loss(
        self, state: dict, outputs: Outputs, teacher: Outputs | None, batch: Batch
    ) -> LossResult:
        """Loss of a batch, see `Objective.loss`."""
        points, labels = self.space.embed(outputs.projected), batch.labels
        samples, space = self.samples_per_class, self.space
        loss = self.function(points, labels, space=space, samples_per_class=samples)
        metrics = batch_metrics(outputs.projected, points, labels, space, samples)
        if self.memory:
            has_teacher = teacher is not None
            keys = self.space.embed(teacher.projected) if teacher else lax.stop_gradient(points)
            memory = state["memory"].write(keys, labels)
            exclude_own = self.memory_only or not has_teacher
            own_rows = state["memory"].next_rows(len(labels)) if exclude_own else None
            references = References(memory.points, memory.labels, own_rows)
            memory_loss = self.function(points, labels, space=self.space, references=references)
            loss = memory_loss if self.memory_only else loss + memory_loss
            state = {"memory": memory}
            metrics |= {"memory_loss": memory_loss, "memory_filled": jnp.mean(memory.labels >= 0)}
        if self.koleo_weight:
            metrics["koleo"] = koleo(points, space=self.space, ids=batch.ids)
            loss += self.koleo_weight * metrics["koleo"]
        return loss, (state, metrics)


_MEMORY_SIZE = Rule(
    lambda value: 0 <= value <= 1 or (1 < value <= 10**9 and value % 1 == 0),
    "a number of images, or a share of the training images up to 1",
)
# Fields of every loss of pairs.
KOLEO = {"koleo_weight": Field(0.0, at_least(0))}  # λ: weight of the differential entropy.
MEMORY = {
    "memory": Field(0.0, _MEMORY_SIZE),  # Images of earlier batches to compare with.
    # Decay of the teacher that embeds the images of the memory; 0: the model that is trained.
    "memory_decay": Field(0.0, Rule(lambda value: 0 <= value < 1, "at least 0 and below 1")),
    "memory_only": Field(False),  # Compare images only with the memory (MoCo, scalable NCA).
}


def _create_by_tuple(
    function: Callable[..., Array], settings: LossSettings, space: Space
) -> PairObjective:
    def loss(points: Array, labels: Array, *, space: Space, **_: None) -> Array:
        del labels  # The order of a batch defines its tuples.
        return function(points, size=settings.tuple_size, space=space)

    return PairObjective(space, loss, None, koleo_weight=settings.fields["koleo_weight"])


def _create(function: Callable[..., Array], settings: LossSettings, space: Space) -> PairObjective:
    fields = settings.fields
    if fields["memory"] and fields.get("mining") == "semihard":
        raise UserError("config.objective.memory must be 0 for semi-hard triplets")
    for name in ("memory_decay", "memory_only"):
        if fields[name] and not fields["memory"]:
            default = MEMORY[name].default
            raise UserError(f"config.objective.{name} must be {default} unless memory is set")
    return PairObjective(
        space,
        function,
        settings.adjacent_samples,
        memory=fields["memory"],
        memory_decay=fields["memory_decay"],
        memory_only=fields["memory_only"],
        koleo_weight=fields["koleo_weight"],
    )


pair_loss = functools.partial(declare, build=_create, shared={**MEMORY, **KOLEO})
_softmax_loss = functools.partial(
    pair_loss,
    rules={"temperature": ABOVE_0},
    learnable=("temperature",),
    divisor=lambda fields: 2 * fields["temperature"],  # −distance / 2 stands for the cosine.
    by_class=True,
)
# Defaults are the papers', with these exceptions. The triplets' margin is Schroff et al.'s. The
# contrastive margin is from unofficial code of IRT. Multi-similarity's defaults are those of HIER
# and pytorch-metric-learning; the paper has base 1. Circle's are for fine-grained retrieval.
PAIR_LOSSES = {
    "tuple_contrastive": declare(
        tuple_contrastive, {"margin": ABOVE_0}, build=_create_by_tuple, shared=KOLEO, by_tuple=True
    ),
    # Without by_class: IRT also trains it on batches that are not grouped by class.
    "contrastive": pair_loss(contrastive, {"margin": at_least(-1)}),
    "multi_similarity": pair_loss(
        multi_similarity,
        {"alpha": ABOVE_0, "beta": ABOVE_0, "base": within(-1, 1)}
        | {"mining": ANY, "epsilon": at_least(0)},
        by_class=True,
        variant="ms",
    ),
    "circle": pair_loss(circle, {"scale": ABOVE_0, "margin": within(-1, 1)}, by_class=True),
    "scalable_nca": _softmax_loss(scalable_nca, variant="snca"),
    "supcon": _softmax_loss(supcon),
    "triplet": pair_loss(
        triplet, {"margin": at_least(0), "mining": one_of(*MININGS)}, by_class=True
    ),
}
