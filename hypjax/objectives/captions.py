"""Loss of images and their captions, in any space: contrastive, and entailment of pairs."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Shaped

from hypjax.errors import UserError
from hypjax.fields import ABOVE_0, Field, at_least
from hypjax.geometry import Composite, Space, cones, lorentz
from hypjax.geometry.arithmetic import Rows, Scalar
from hypjax.objectives.base import Declaration, Loss, LossSettings, Metrics, Objective
from hypjax.objectives.comparisons import mean_where, norms
from hypjax.objectives.image_text import (
    BOX_CONE,
    TEXT_CONE,
    Positives,
    contrastive_loss,
    cross_entropy,
    pair_entailment,
)
from hypjax.types import IMAGES, POSITIVES, TEXTS, Batch, Outputs


class Boxes(NamedTuple):
    """Points of a part of each image, and of words for it."""

    images: Rows
    texts: Rows
    exist: Bool[Array, " n"]  # Whether an image has a box.


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
    boxes: Boxes | None = None,
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

    With `boxes`, the loss is HyCoCLIP's (Pal et al., ICLR 2025, Section 3), and in a product
    PHyCLIP's: ¼ of four cross-entropies, in which boxes are queries only, and λ/2 of four
    entailments (`image_text.hycoclip_loss`); rows without a box only count as wholes.
    """
    logits = -space.distance_matrix(images, texts) / temperature
    loss = contrastive_loss(logits, positives)
    if boxes is not None:
        by_image = -space.distance_matrix(boxes.images, texts) / temperature
        by_text = -space.distance_matrix(boxes.texts, images) / temperature
        loss = loss / 2 + cross_entropy(by_image, positives, boxes.exist) / 4
        loss += cross_entropy(by_text, positives.T, boxes.exist) / 4
    if entailment and boxes is not None:
        loss += entailment / 2 * _box_entailment(space, images, texts, boxes)
    elif entailment:
        loss += entailment * jnp.mean(_over_parts(pair_entailment, space, texts, images))
    if phrases is not None and phrase_entailment:
        outside = _over_parts(pair_entailment, space, phrases, texts)
        differs = jnp.any(phrases != texts, axis=-1)
        loss += phrase_entailment * jnp.mean(jnp.where(differs, outside, 0))
    return loss


def _box_entailment(space: Space, images: Rows, texts: Rows, boxes: Boxes) -> Loss:
    """The sum of HyCoCLIP's four entailments, each the mean over its pairs and over parts."""
    of_text = functools.partial(pair_entailment, eta=TEXT_CONE)
    of_box = functools.partial(pair_entailment, eta=BOX_CONE)
    outside = _over_parts(of_text, space, boxes.texts, boxes.images)
    outside += _over_parts(of_box, space, boxes.images, images)
    outside += _over_parts(of_box, space, boxes.texts, texts)
    of_wholes = jnp.mean(_over_parts(of_text, space, texts, images))
    return of_wholes + mean_where(jnp.mean(outside, axis=0), boxes.exist)


def _over_parts(
    compare: Callable[[Rows, Rows, Any], Array], space: Space, apexes: Rows, inner: Rows
) -> Shaped[Array, "parts n"]:
    """Compares the cones of pairs of points in each hyperbolic part of a space."""

    def in_part(part: Space, *points: Rows) -> Array:
        (apex, c), (point, _) = (_on_hyperboloid(part, x) for x in points)
        return compare(apex, point, c)

    if not isinstance(space, Composite):
        return jnp.stack([in_part(space, apexes, inner)])
    curved = [i for i, (part, _) in enumerate(space.parts) if part.ball() is not None]
    hyperbolic = dataclasses.replace(space, parts=tuple(space.parts[i] for i in curved))
    coordinates = ([x[i] for i in curved] for x in (space.split(apexes), space.split(inner)))
    return jnp.stack(hyperbolic.in_parts(in_part, *coordinates))


def _on_hyperboloid(part: Any, points: Rows) -> tuple[Array, Any]:
    """Points of a hyperbolic space on the hyperboloid, and its c."""
    ball = part.ball()
    return lorentz.from_poincare(part.to_ball(points), ball.c), ball.c


def _holds(apexes: Rows, inner: Rows, c: Any) -> Bool[Array, " n"]:
    """Whether the cones of apexes hold points."""
    return cones.exterior_angle(apexes, inner, c) <= cones.half_aperture(apexes, c)


def hyperboloids(space: Space, points: Rows) -> list[tuple[Float[Array, "n k"], Any]]:
    """Points on the hyperboloids of a space's hyperbolic parts, with the c of each."""
    coordinates = space.split(points) if space.parts else [points]
    pairs = zip(_parts(space), coordinates, strict=True)
    return [_on_hyperboloid(part, x) for part, x in pairs if part.ball() is not None]


def _parts(space: Space) -> list[Space]:
    return [part for part, _ in space.parts] or [space]


@dataclasses.dataclass(frozen=True)
class Captions(Objective):
    """Draws images and their captions together, and texts of others away."""

    space: Space
    temperature: Scalar
    entailment: float
    phrases: float
    boxed: bool = False  # Whether the second half of a batch are boxes of the first.
    towers = (IMAGES, TEXTS)

    def loss(self, outputs: dict[str, Outputs], batch: Batch) -> tuple[Loss, Metrics]:
        """Loss of a batch, whose inputs mark the positives, see `Objective.loss`."""
        features, words = (outputs[name].projected for name in self.towers)
        phrases = None
        if words.ndim == 3:  # Each row has a caption and one of its phrases.
            phrases, words = self.space.embed(words[:, 1]), words[:, 0]
        images, texts = self.space.embed(features), self.space.embed(words)
        positives = jnp.asarray(batch.inputs[POSITIVES])[: len(images)]
        boxes = None
        if self.boxed:
            half = len(images) // 2
            exist = jnp.asarray(batch.ids[half:] != batch.ids[:half])
            boxes = Boxes(images[half:], texts[half:], exist)
            features, images, texts = features[:half], images[:half], texts[:half]
            positives = positives[:half, :half]
        loss = caption_loss(
            images,
            texts,
            positives,
            self.space,
            temperature=self.temperature,
            entailment=self.entailment,
            phrases=phrases,
            phrase_entailment=self.phrases,
            boxes=boxes,
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
    if settings.boxed and fields["phrases"]:
        raise UserError("with boxes, config.objective.phrases must be 0")
    return Captions(
        space, fields["temperature"], fields["entailment"], fields["phrases"], settings.boxed
    )


CAPTIONS = Declaration(
    _create,
    {
        "temperature": Field(0.07, ABOVE_0, learnable=True),  # τ, CLIP's start.
        "entailment": Field(0.2, at_least(0)),  # λ of MERU; 0 without hyperbolic parts.
        "phrases": Field(0.0, at_least(0)),  # Likewise, of captions in the cones of their phrases.
    },
    reference="Radford et al., ICML 2021; Desai et al., ICML 2023",
)
