"""Losses that compare the images of a batch with proxies: points that stand for the classes.

Losses use the distance of a space. On the sphere they are the published losses of the cosine; in
other spaces, `hypjax.objectives.comparisons.similarity` takes its place. Proxies are trained with
the model. `proxy_anchor` explains common arguments and errors.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, PRNGKeyArray
from ml_collections import ConfigDict

from hypjax.fields import ABOVE_0, Field, at_least, one_of, within
from hypjax.geometry import Space
from hypjax.objectives.base import (
    Group,
    Loss,
    Metrics,
    Objective,
    ProblemSizes,
    adjacent_samples,
    declare,
)
from hypjax.objectives.comparisons import (
    SPHERE,
    Embeddings,
    Labels,
    batch_metrics,
    compare_proxies,
    log1p_sum_exp,
    mean_where,
    similarity,
)
from hypjax.objectives.proxy_points import ball_of_proxies, proxy_parameters, proxy_points
from hypjax.types import Batch, Outputs


def proxy_anchor(
    embeddings: Embeddings,
    labels: Labels,
    proxies: Float[ArrayLike, "classes dim"],
    *,
    space: Space = SPHERE,
    margin: float = 0.1,
    alpha: float = 32.0,
) -> Float[Array, ""]:
    """Proxy-Anchor loss (Kim et al., CVPR 2020, Eq. 4).

    The mean over the proxies of classes in the batch of log(1 + Σ_{own} exp(−α·(s − δ))), plus the
    mean over all proxies of log(1 + Σ_{others} exp(α·(s + δ))), where the sums are over the images
    that are, or are not, of the proxy's class. s is the cosine on the sphere and 1 − distance / 2
    in other spaces. `margin` is δ, and `alpha` α > 0.

    Embeddings and proxies, one for each class, are points of the space, as from `space.embed`.
    Labels count from 0; under `jit`, they must be integers. Missing labels, or labels without a
    proxy unless traced, are a `ValueError`.
    """
    distances, own = compare_proxies(space, embeddings, labels, jnp.asarray(proxies)[:, None])
    s = similarity(distances[..., 0])
    pull = log1p_sum_exp(-alpha * (s - margin), own, axis=0)
    push = log1p_sum_exp(alpha * (s + margin), ~own, axis=0)
    return mean_where(pull, jnp.any(own, axis=0)) + jnp.mean(push)


def proxy_nca(
    embeddings: Embeddings,
    labels: Labels,
    proxies: Float[ArrayLike, "classes dim"],
    *,
    space: Space = SPHERE,
    temperature: float = 1.0,
) -> Float[Array, ""]:
    """Proxy-NCA loss (Movshovitz-Attias et al., ICCV 2017), normalised as a probability.

    The mean of −log softmax(−distance / τ) at the image's class, over the proxies of all classes.
    This is the form of ProxyNCA++ (Teh et al., ECCV 2020) and of pytorch-metric-learning. The
    original leaves the proxy of the image's class out of the denominator, which makes the loss
    unbounded below. The temperature τ > 0 is 1 in the original, and 1/9 in ProxyNCA++.
    """
    distances, own = compare_proxies(space, embeddings, labels, jnp.asarray(proxies)[:, None])
    return _cross_entropy(-distances[..., 0] / temperature, own)


def normalized_softmax(
    embeddings: Embeddings,
    labels: Labels,
    proxies: Float[ArrayLike, "classes dim"],
    *,
    space: Space = SPHERE,
    temperature: float = 0.05,
) -> Float[Array, ""]:
    """Normalised softmax loss (Zhai and Wu, BMVC 2019, Eq. 4).

    The cross-entropy of the logits s/τ, where s is the cosine on the sphere, −distance / 2 in any
    space. It equals `proxy_nca` at twice the temperature.
    """
    return proxy_nca(embeddings, labels, proxies, space=space, temperature=2 * temperature)


def soft_triple(
    embeddings: Embeddings,
    labels: Labels,
    proxies: Float[ArrayLike, "classes centres dim"],
    *,
    space: Space = SPHERE,
    scale: float = 20.0,
    gamma: float = 0.1,
    margin: float = 0.01,
    regularization: float = 0.2,
) -> Float[Array, ""]:
    """SoftTriple loss, with several centres for each class (Qian et al., ICCV 2019, Eq. 10).

    The similarity of an image and a class is Σ_k softmax_k(s_k/γ)·s_k over the K centres of the
    class, where s is the cosine on the sphere and 1 − distance / 2 in other spaces. The loss is the
    cross-entropy of λ times these similarities, lowered by δ for the image's own class. The
    regularisation draws the centres of a class together: it is the mean over the classes of
    Σ √separation, over pairs of centres, divided by K·(K − 1). On the sphere, the root is the
    length of the chord; in the ball, sinh(√c·distance/2)/√c.

    `scale` is λ > 0, `gamma` γ > 0, `margin` δ, and `regularization` a weight, the paper's τ.
    """
    distances, own = compare_proxies(space, embeddings, labels, proxies)
    s = similarity(distances)
    classes = jnp.sum(jax.nn.softmax(s / gamma, axis=-1) * s, axis=-1)
    loss = _cross_entropy(scale * (classes - margin * own), own)
    if regularization == 0 or jnp.shape(proxies)[1] == 1:
        return loss
    return loss + regularization * _spread(space, jnp.asarray(proxies))


def arcface(
    embeddings: Embeddings,
    labels: Labels,
    proxies: Float[ArrayLike, "classes centres dim"],
    *,
    space: Space = SPHERE,
    scale: float = 64.0,
    margin: float = 0.5,
    cosine_margin: float = 0.0,
) -> Float[Array, ""]:
    """ArcFace, with sub-centres (Deng et al., CVPR 2019, Eqs. 3 and 4, and ECCV 2020).

    The cross-entropy of s times the cosines of an image and the classes, with cos(θ + m) − m′ in
    place of cos θ for its own class; of several centres, the nearest counts. Where θ + m exceeds π
    and its cosine would rise again, cos θ − m·sin m takes its place, as in the authors' code.
    Gradients have their true, bounded size also where θ is nearly 0 or π.

    The margin is an angle seen from the centre, which is the distance only on the sphere: in the
    ball it would ignore how far out points lie. `Hier` adds this loss of the angles to one of the
    ball's distances; `cosface` has a margin for any space.

    `scale` is s > 0, `margin` m ≥ 0 in radians, and `cosine_margin` m′: m2 and m3 in the paper's
    combined margin (with m1 = 1).
    """
    if not (space.squared and space.normalized):
        raise ValueError(f"the space is {space}; it must be the sphere, where a margin is an angle")
    distances, own = compare_proxies(space, embeddings, labels, proxies)
    distances = jnp.min(distances, axis=-1)
    target = _cosine_beyond(distances, margin) - cosine_margin
    return _cross_entropy(scale * jnp.where(own, target, similarity(distances)), own)


def cosface(
    embeddings: Embeddings,
    labels: Labels,
    proxies: Float[ArrayLike, "classes centres dim"],
    *,
    space: Space = SPHERE,
    scale: float = 64.0,
    margin: float = 0.35,
) -> Float[Array, ""]:
    """CosFace, with sub-centres as in `arcface` (Wang et al., CVPR 2018, Eq. 4).

    The cross-entropy of λ times the similarities of an image and the classes, lowered by m for its
    own class. The similarity is the cosine on the sphere and 1 − distance / 2 in
    other spaces. In the ball, this is HAM-Softmax (Fang and He, 2026) with half the scale and twice
    the margin. `scale` is λ > 0, the paper's s, and `margin` m.
    """
    distances, own = compare_proxies(space, embeddings, labels, proxies)
    return _cross_entropy(scale * (similarity(jnp.min(distances, axis=-1)) - margin * own), own)


def _cosine_beyond(distances: Float[Array, "*b"], margin: float) -> Float[Array, "*b"]:
    """cos(θ + m) from the sphere's distances; its continuation where θ + m exceeds π."""
    # sin θ is a product of the chord: as a function of the cosine it would have infinite slopes.
    cosine = similarity(distances)
    below = cosine > -jnp.cos(margin)
    squares = jnp.where(below, distances, 1)
    sine = SPHERE.length(squares) * jnp.sqrt(1 - squares / 4)
    beyond = cosine * jnp.cos(margin) - sine * jnp.sin(margin)
    return jnp.where(below, beyond, cosine - margin * jnp.sin(margin))


def _cross_entropy(logits: Float[Array, "n classes"], own: Bool[Array, "n classes"]) -> Loss:
    """Mean cross-entropy, as log(1 + Σ exp(other − own)), which keeps its digits when small."""
    target = jnp.sum(logits, axis=1, keepdims=True, where=own)
    return jnp.mean(log1p_sum_exp(logits - target, ~own, axis=1))


def _spread(space: Space, proxies: Float[Array, "classes centres dim"]) -> Float[Array, ""]:
    """Regularisation of `soft_triple`, whose gradient is 0 for centres that coincide."""
    classes, centres, _ = proxies.shape
    first, second = np.triu_indices(centres, k=1)
    separations = space.separation(proxies[:, first], proxies[:, second])
    apart = separations > 0
    roots = jnp.sqrt(jnp.where(apart, separations, 1))
    return jnp.sum(roots, where=apart) / (classes * centres * (centres - 1))


@dataclasses.dataclass(frozen=True)
class ProxyObjective(Objective):
    """A loss between the images of a batch and proxies of all classes.

    As for Proxy-Anchor (Kim et al., CVPR 2020), proxies start normally distributed, before the
    space embeds them, with the variance 2 / (number of proxies), Kaiming's with a classifier's
    fan-out.
    """

    space: Space
    function: Callable[..., Array]  # The loss, with its settings.
    centres: int | None  # Number of proxies of each class; None for one, of a loss that takes one.
    rate: float  # Factor of the proxies' learning rate.
    ball_c: float | str | None  # Of the proxies.
    samples_per_class: int | None  # None if batches hold any classes.

    @property
    def groups(self) -> tuple[Group, ...]:
        """The proxies, with a learning rate of their own."""
        return (Group(("proxies",), self.rate, ball_c=self.ball_c),)

    def init(self, key: PRNGKeyArray, spec: ProblemSizes) -> tuple[dict, dict]:
        """Returns random proxies, and no state."""
        centres = () if self.centres is None else (self.centres,)
        shape = (spec.classes, *centres, spec.head_dim)
        deviation = (2 / (spec.classes * (self.centres or 1))) ** 0.5
        proxies = jax.random.normal(key, shape) * deviation
        return {"proxies": proxy_parameters(proxies, self.space, self.ball_c)}, {}

    def loss(self, params: dict, outputs: Outputs, batch: Batch) -> tuple[Loss, Metrics]:
        """Loss of a batch, see `Objective.loss`."""
        points = self.space.embed(outputs.projected)
        # `Matryoshka` compares prefixes of the output with prefixes of the proxies.
        proxies = params["proxies"][..., : outputs.projected.shape[-1]]
        proxies = proxy_points(proxies, self.space, self.ball_c)
        loss = self.function(points, batch.labels, proxies, space=self.space)
        compared = points, batch.labels, self.space, self.samples_per_class
        return loss, batch_metrics(outputs.projected, *compared)


_SHARED = {
    # Factor of the proxies' learning rate. Default from Proxy-Anchor and SoftTriple.
    "proxy_rate": Field(100.0, at_least(0)),
    # 'riemannian': proxies are points of a hyperbolic space, which Riemannian Adam moves.
    "proxy_optimizer": Field("adam", one_of("adam", "riemannian")),
}


def _create(function: Callable[..., Array], config: ConfigDict, space: Space) -> ProxyObjective:
    fields = config.objective
    ball_c = ball_of_proxies("proxy_optimizer", fields, space)
    proxies = fields.get("centres"), fields.proxy_rate, ball_c
    return ProxyObjective(space, function, *proxies, adjacent_samples(config))


def _centres(default: int) -> dict[str, Field]:
    """Fields of a loss with several proxies of a class."""
    return {"centres": Field(default, within(1, 10**4)), **_SHARED}


proxy_loss = functools.partial(declare, build=_create)
_TEMPERATURE = {"rules": {"temperature": ABOVE_0}, "learnable": ("temperature",), "shared": _SHARED}
# Defaults are the papers', see the functions.
PROXY_LOSSES = {
    "arcface": proxy_loss(
        arcface,
        # In radians: up to a right angle.
        {"scale": ABOVE_0, "margin": within(0, 1.57), "cosine_margin": at_least(0)},
        learnable=("scale",),
        shared=_centres(1),
        spaces=("sphere",),
    ),
    "cosface": proxy_loss(
        cosface, {"scale": ABOVE_0, "margin": at_least(0)}, learnable=("scale",), shared=_centres(1)
    ),
    "proxy_anchor": proxy_loss(
        proxy_anchor, {"margin": at_least(0), "alpha": ABOVE_0}, shared=_SHARED, variant="pa"
    ),
    "proxy_nca": proxy_loss(proxy_nca, **_TEMPERATURE, variant="nca"),
    "normalized_softmax": proxy_loss(normalized_softmax, **_TEMPERATURE, variant="softmax"),
    "soft_triple": proxy_loss(
        soft_triple,
        {"scale": ABOVE_0, "gamma": ABOVE_0, "margin": at_least(0), "regularization": at_least(0)},
        learnable=("scale",),
        shared=_centres(10),
        variant="softtriple",
    ),
}
