"""Loss of images and their captions, in any space: contrastive, and entailment of pairs."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

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
) -> Loss:
    """The symmetric contrastive loss of −distance/τ, plus λ times the entailment of pairs.

    Row i of the images and row i of the texts, points of the space, are a pair. `positives` marks
    all pairs of an image i and a text j that describes it: the other captions of the image, and
    equal texts of other images, are no negatives (`image_text.cross_entropy`). On the sphere, −d/τ
    is 2 cos/τ and a constant, so CLIP's τ = 0.07 is 0.14 here.

    `entailment` is λ, 0.2 in MERU (Desai et al., ICML 2023, Section 3): a text is more general than
    its image, and its cone (K = 0.1) is to hold it. In a product, the loss is the mean over its
    hyperbolic parts, as in PHyCLIP; a space without any has no cones, and λ must be 0.
    """
    logits = -space.distance_matrix(images, texts) / temperature
    loss = contrastive_loss(logits, positives)
    if not entailment:
        return loss
    parts = zip(hyperboloids(space, texts), hyperboloids(space, images), strict=True)
    entailed = [pair_entailment(apex, inner, c) for (apex, c), (inner, _) in parts]
    return loss + entailment * jnp.mean(jnp.stack(entailed))


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
    towers = (IMAGES, TEXTS)

    def loss(self, outputs: dict[str, Outputs], batch: Batch) -> tuple[Loss, Metrics]:
        """Loss of a batch, whose inputs mark the positives, see `Objective.loss`."""
        features, words = (outputs[name].projected for name in self.towers)
        images, texts = self.space.embed(features), self.space.embed(words)
        positives = jnp.asarray(batch.inputs[POSITIVES])[: len(images)]
        loss = caption_loss(
            images,
            texts,
            positives,
            self.space,
            temperature=self.temperature,
            entailment=self.entailment,
        )
        fixed_images, fixed_texts = lax.stop_gradient((images, texts))
        metrics = norms(self.space, lax.stop_gradient(features), fixed_images)
        metrics["text_norm"] = jnp.mean(jnp.linalg.norm(fixed_texts, axis=-1))
        parts = zip(
            hyperboloids(self.space, fixed_texts),
            hyperboloids(self.space, fixed_images),
            strict=True,
        )
        held = [
            cones.exterior_angle(apex, inner, c) <= cones.half_aperture(apex, c)
            for (apex, c), (inner, _) in parts
        ]
        if held:
            metrics["entailed_share"] = jnp.mean(jnp.stack(held))
        return loss, metrics


def _create(settings: LossSettings, space: Space) -> Captions:
    fields = settings.fields
    if fields["entailment"] and all(part.ball() is None for part in _parts(space)):
        advice = "leave out --config.objective.entailment, or set it to 0"
        raise UserError(f"objective.space={fields['space']} has no cones; {advice}")
    return Captions(space, fields["temperature"], fields["entailment"])


CAPTIONS = Declaration(
    _create,
    {
        "temperature": Field(0.07, ABOVE_0, learnable=True),  # τ, CLIP's start.
        "entailment": Field(0.2, at_least(0)),  # λ of MERU; 0 without hyperbolic parts.
    },
    reference="Radford et al., ICML 2021; Desai et al., ICML 2023",
)
