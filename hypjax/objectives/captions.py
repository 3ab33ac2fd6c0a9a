"""Loss of images and their captions, in any space: contrastive, and entailment of pairs."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Shaped

from hypjax.errors import UserError
from hypjax.fields import ABOVE_0, Field, at_least
from hypjax.geometry import Space, cones, lorentz
from hypjax.geometry.arithmetic import Rows, Scalar
from hypjax.objectives.base import Declaration, Loss, LossSettings, Metrics, Objective
from hypjax.objectives.comparisons import norms
from hypjax.objectives.image_text import Positives, contrastive_loss, pair_entailment
from hypjax.types import IMAGES, POSITIVES, TEXTS, Batch, Outputs


def caption_loss(
    images: Rows,
    texts: Rows,
    positives: Positives,
    space: Space,
    *,
    temperature: Scalar,
    entailment: float = 0.0,
    phrases: Rows | None = None,
    phrase_entailment: float = 0.0,
) -> Loss:
    """The symmetric contrastive loss of −distance/τ, plus λ times the entailment of pairs.

    Row i of the images and row i of the texts, points of the space, are a pair. `positives` marks
    all pairs of an image i and a text j that describes it: the other captions of the image, and
    equal texts of other images, are no negatives (`image_text.cross_entropy`). On the sphere, −d/τ
    is 2 cos/τ and a constant, so CLIP's τ = 0.07 is 0.14 here.

    `entailment` is λ, 0.2 in MERU (Desai et al., ICML 2023, Section 3): a text is more general than
    its image, and its cone (K = 0.1) is to hold it. In a product, the loss is the mean over its
    hyperbolic parts, as in PHyCLIP; a space without any has no cones, and λ must be 0.

    Row i of `phrases` is a text that is more general than text i, whose cone is to hold that text,
    with the weight `phrase_entailment`; or text i itself, which adds nothing.
    """
    logits = -space.distance_matrix(images, texts) / temperature
    loss = contrastive_loss(logits, positives)
    if entailment:
        loss += entailment * jnp.mean(_over_parts(pair_entailment, space, texts, images))
    if phrases is not None and phrase_entailment:
        outside = _over_parts(pair_entailment, space, phrases, texts)
        differs = jnp.any(phrases != texts, axis=-1)
        loss += phrase_entailment * jnp.mean(jnp.where(differs, outside, 0))
    return loss


def _over_parts(
    compare: Callable[[Rows, Rows, Any], Array], space: Space, apexes: Rows, inner: Rows
) -> Shaped[Array, "parts n"]:
    """Compares the cones of pairs of points in each hyperbolic part of a space."""
    parts = zip(hyperboloids(space, apexes), hyperboloids(space, inner), strict=True)
    return jnp.stack([compare(apex, point, c) for (apex, c), (point, _) in parts])


def _holds(apexes: Rows, inner: Rows, c: Any) -> Bool[Array, " n"]:
    """Whether the cones of apexes hold points."""
    return cones.exterior_angle(apexes, inner, c) <= cones.half_aperture(apexes, c)


def hyperboloids(space: Space, points: Rows) -> list[tuple[Float[Array, "n k"], Any]]:
    """Points on the hyperboloids of a space's hyperbolic parts, with the c of each."""
    coordinates = space.split(points) if space.parts else [points]
    return [
        (lorentz.from_poincare(part.to_ball(x), ball.c), ball.c)
        for part, x in zip(_parts(space), coordinates, strict=True)
        if (ball := part.ball()) is not None
    ]


def _parts(space: Space) -> list[Space]:
    return [part for part, _ in space.parts] or [space]


@dataclasses.dataclass(frozen=True)
class Captions(Objective):
    """Draws images and their captions together, and texts of others away."""

    space: Space
    temperature: Scalar
    entailment: float
    phrases: float
    towers = (IMAGES, TEXTS)

    def loss(self, outputs: dict[str, Outputs], batch: Batch) -> tuple[Loss, Metrics]:
        """Loss of a batch, whose inputs mark the positives, see `Objective.loss`."""
        features, words = (outputs[name].projected for name in self.towers)
        phrases = None
        if words.ndim == 3:  # Each row has a caption and one of its phrases.
            phrases, words = self.space.embed(words[:, 1]), words[:, 0]
        images, texts = self.space.embed(features), self.space.embed(words)
        positives = jnp.asarray(batch.inputs[POSITIVES])[: len(images)]
        loss = caption_loss(
            images,
            texts,
            positives,
            self.space,
            temperature=self.temperature,
            entailment=self.entailment,
            phrases=phrases,
            phrase_entailment=self.phrases,
        )
        fixed_images, fixed_texts = lax.stop_gradient((images, texts))
        metrics = norms(self.space, lax.stop_gradient(features), fixed_images)
        metrics["text_norm"] = jnp.mean(jnp.linalg.norm(fixed_texts, axis=-1))
        if has_cones(self.space):
            held = _over_parts(_holds, self.space, fixed_texts, fixed_images)
            metrics["entailed_share"] = jnp.mean(held)
        if has_cones(self.space) and phrases is not None:
            phrases = lax.stop_gradient(phrases)
            differs = jnp.any(phrases != fixed_texts, axis=-1)
            held = jnp.all(_over_parts(_holds, self.space, phrases, fixed_texts), axis=0)
            count = jnp.maximum(jnp.sum(differs), 1)
            metrics["entailed_phrases"] = jnp.sum(held & differs) / count
        return loss, metrics


def has_cones(space: Space) -> bool:
    """Whether a space has a hyperbolic part, in which points have entailment cones."""
    return any(part.ball() is not None for part in _parts(space))


def _create(settings: LossSettings, space: Space) -> Captions:
    fields = settings.fields
    for name in ("entailment", "phrases"):
        if fields[name] and not has_cones(space):
            advice = f"leave out --config.objective.{name}, or set it to 0"
            raise UserError(f"objective.space={fields['space']} has no cones; {advice}")
    return Captions(space, fields["temperature"], fields["entailment"], fields["phrases"])


CAPTIONS = Declaration(
    _create,
    {
        "temperature": Field(0.07, ABOVE_0, learnable=True),  # τ, CLIP's start.
        "entailment": Field(0.2, at_least(0)),  # λ of MERU; 0 without hyperbolic parts.
        "phrases": Field(0.0, at_least(0)),  # Likewise, of captions in the cones of their phrases.
    },
    reference="Radford et al., ICML 2021; Desai et al., ICML 2023",
)
