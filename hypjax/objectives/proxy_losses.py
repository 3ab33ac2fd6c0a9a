"""Losses that compare the images of a batch with proxies: points that represent the classes.

Losses use the distance of a space. On the sphere they are the published losses, which use the
cosine; in other spaces, `hypjax.objectives.comparisons.similarity` replaces the cosine. Proxies are
trained with the model. `proxy_anchor` documents the common arguments and errors.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from hypjax.errors import UserError
from hypjax.fields import ABOVE_0, Field, at_least, one_of, within
from hypjax.geometry import Space, poincare
from hypjax.geometry.arithmetic import AnyArray, Scalar
from hypjax.objectives.base import (
    LEARNED,
    BallC,
    Group,
    Loss,
    LossSettings,
    Metrics,
    Objective,
    ProblemSizes,
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
from hypjax.types import Batch, Outputs


def proxy_anchor(
    embeddings: Embeddings,
    labels: Labels,
    proxies: Float[AnyArray, "classes dim"],
    *,
    space: Space = SPHERE,
    margin: float = 0.1,
    alpha: float = 32.0,
) -> Float[Array, ""]:
    """Proxy-Anchor loss (Kim et al., CVPR 2020, Eq. 4).

    The loss has two terms: the mean of log(1 + Σ exp(−α·(s − δ))) over the proxies of classes in
    the batch, with the sum over images of the proxy's class; plus the mean of
    log(1 + Σ exp(α·(s + δ))) over all proxies, with the sum over images of other classes. s is the
    cosine on the sphere and 1 − distance / 2 in other spaces. `margin` is δ, and `alpha` α > 0.

    Embeddings and proxies, one for each class, are points of the space, as from `space.embed`.
    Labels are integers that count from 0. Raises a `ValueError` for other labels, and, unless they
    are traced, for labels without a proxy.

    Examples:
        >>> import numpy as np
        >>> from hypjax.objectives import proxy_anchor
        >>> points = np.array([[1, 0], [0.8, 0.6], [0, 1], [-0.6, 0.8]])  # Of the sphere.
        >>> print(f"{proxy_anchor(points, [0, 0, 1, 1], np.eye(2)):.3f}")
        12.820
    """
    distances, same = compare_proxies(space, embeddings, labels, jnp.asarray(proxies)[:, None])
    s = similarity(distances[..., 0])
    pull = log1p_sum_exp(-alpha * (s - margin), same, axis=0)
    push = log1p_sum_exp(alpha * (s + margin), ~same, axis=0)
    return mean_where(pull, jnp.any(same, axis=0)) + jnp.mean(push)


def proxy_nca(
    embeddings: Embeddings,
    labels: Labels,
    proxies: Float[AnyArray, "classes dim"],
    *,
    space: Space = SPHERE,
    temperature: Scalar = 1.0,
) -> Float[Array, ""]:
    """Proxy-NCA loss (Movshovitz-Attias et al., ICCV 2017), normalised as a probability.

    The loss is the mean of −log softmax(−distance / τ) at the image's class, where the softmax is
    over the proxies of all classes, as in ProxyNCA++ (Teh et al., ECCV 2020) and
    pytorch-metric-learning. The original omits the proxy of the image's class from the denominator,
    which makes the loss unbounded below. Its temperature τ > 0 is 1; the one of ProxyNCA++ is 1/9.

    Examples:
        >>> import numpy as np
        >>> from hypjax.objectives import proxy_nca
        >>> points = np.array([[1, 0], [0.8, 0.6], [0, 1], [-0.6, 0.8]])  # Of the sphere.
        >>> print(f"{proxy_nca(points, [0, 0, 1, 1], np.eye(2)):.3f}")
        0.206
    """
    distances, same = compare_proxies(space, embeddings, labels, jnp.asarray(proxies)[:, None])
    return _cross_entropy(-distances[..., 0] / temperature, same)


def normalized_softmax(
    embeddings: Embeddings,
    labels: Labels,
    proxies: Float[AnyArray, "classes dim"],
    *,
    space: Space = SPHERE,
    temperature: Scalar = 0.05,
) -> Float[Array, ""]:
    """Normalised softmax loss (Zhai and Wu, BMVC 2019, Eq. 4).

    The loss is the cross-entropy of the logits s/τ, with s = −distance / 2 (on the sphere, the
    cosine up to a constant). It equals `proxy_nca` at twice the temperature.

    Examples:
        >>> import numpy as np
        >>> from hypjax.objectives import normalized_softmax
        >>> points = np.array([[1, 0], [0.8, 0.6], [0, 1], [-0.6, 0.8]])  # Of the sphere.
        >>> print(f"{normalized_softmax(points, [0, 0, 1, 1], np.eye(2)):.3f}")
        0.005
    """
    return proxy_nca(embeddings, labels, proxies, space=space, temperature=2 * temperature)


def soft_triple(
    embeddings: Embeddings,
    labels: Labels,
    proxies: Float[AnyArray, "classes centres dim"],
    *,
    space: Space = SPHERE,
    scale: Scalar = 20.0,
    gamma: float = 0.1,
    margin: float = 0.01,
    regularization: float = 0.2,
) -> Float[Array, ""]:
    """SoftTriple loss, with several centres for each class (Qian et al., ICCV 2019, Eq. 10).

    The similarity of an image and a class is Σ_k softmax_k(s_k/γ)·s_k over the K centres of the
    class, where s is the cosine on the sphere and 1 − distance / 2 in other spaces. The loss is the
    cross-entropy of λ times these similarities, after δ is subtracted from the similarity to the
    image's class. The regularisation draws the centres of a class together: it is the mean over the
    classes of Σ √separation / (K·(K − 1)), summed over pairs of centres. The root is the chord's
    length on the sphere, and sinh(√c·distance/2)/√c in the ball.

    `scale` is λ > 0, `gamma` γ > 0, `margin` δ, and `regularization` the weight τ of the paper.

    Examples:
        >>> import numpy as np
        >>> from hypjax.objectives import soft_triple
        >>> points = np.array([[1, 0], [0.8, 0.6], [0, 1], [-0.6, 0.8]])  # Of the sphere.
        >>> print(f"{soft_triple(points, [0, 0, 1, 1], np.eye(2)[:, None]):.3f}")
        0.006
    """
    distances, same = compare_proxies(space, embeddings, labels, proxies)
    s = similarity(distances)
    classes = jnp.sum(jax.nn.softmax(s / gamma, axis=-1) * s, axis=-1)
    loss = _cross_entropy(scale * (classes - margin * same.astype(s.dtype)), same)
    if regularization == 0 or jnp.shape(proxies)[1] == 1:
        return loss
    return loss + regularization * _spread(space, jnp.asarray(proxies))


def arcface(
    embeddings: Embeddings,
    labels: Labels,
    proxies: Float[AnyArray, "classes centres dim"],
    *,
    space: Space = SPHERE,
    scale: Scalar = 64.0,
    margin: float = 0.5,
    cosine_margin: float = 0.0,
) -> Float[Array, ""]:
    """ArcFace, with sub-centres (Deng et al., CVPR 2019, Eqs. 3 and 4, and ECCV 2020).

    The loss is the cross-entropy of s times the cosines of an image and the classes, where
    cos(θ + m) − m′ replaces cos θ for the image's class. With several centres, the nearest counts.
    Where θ + m exceeds π, so that its cosine would rise again, cos θ − m·sin m replaces it, as in
    the authors' code. Gradients are exact and bounded even where θ is nearly 0 or π.

    The margin is an angle at the origin, so the space must be the sphere: in the ball, an angle
    would ignore distances from the origin. `Hier` combines this loss of angles with a loss of
    distances in the ball; `cosface` has a margin for any space.

    `scale` is s > 0, `margin` m ≥ 0 in radians, and `cosine_margin` m′. In the paper's combined
    margin, m is m2, m′ is m3, and m1 is 1.

    Examples:
        >>> import numpy as np
        >>> from hypjax.objectives import arcface
        >>> points = np.array([[1, 0], [0.8, 0.6], [0, 1], [-0.6, 0.8]])  # Of the sphere.
        >>> print(f"{arcface(points, [0, 0, 1, 1], np.eye(2)[:, None]):.3f}")
        2.969
    """
    if not (space.squared and space.normalized):
        raise ValueError(f"the space is {space}; it must be the sphere, where a margin is an angle")
    distances, same = compare_proxies(space, embeddings, labels, proxies)
    distances = jnp.min(distances, axis=-1)
    target = _cosine_with_margin(distances, margin) - cosine_margin
    return _cross_entropy(scale * jnp.where(same, target, similarity(distances)), same)


def cosface(
    embeddings: Embeddings,
    labels: Labels,
    proxies: Float[AnyArray, "classes centres dim"],
    *,
    space: Space = SPHERE,
    scale: Scalar = 64.0,
    margin: float = 0.35,
) -> Float[Array, ""]:
    """CosFace, with sub-centres as in `arcface` (Wang et al., CVPR 2018, Eq. 4).

    The loss is the cross-entropy of λ times the similarities of an image and the classes, after m
    is subtracted at the image's class. The similarity is the cosine on the sphere and
    1 − distance / 2 in other spaces. In the ball, this is HAM-Softmax (Fang and He, 2026) with half
    the scale and twice the margin. `scale` is λ > 0, the paper's s, and `margin` m.

    Examples:
        >>> import numpy as np
        >>> from hypjax.objectives import cosface
        >>> points = np.array([[1, 0], [0.8, 0.6], [0, 1], [-0.6, 0.8]])  # Of the sphere.
        >>> print(f"{cosface(points, [0, 0, 1, 1], np.eye(2)[:, None]):.3f}")
        2.400
    """
    distances, same = compare_proxies(space, embeddings, labels, proxies)
    s = similarity(jnp.min(distances, axis=-1))
    return _cross_entropy(scale * (s - margin * same.astype(s.dtype)), same)


def _cosine_with_margin(distances: Float[Array, "*b"], margin: float) -> Float[Array, "*b"]:
    """cos(θ + m) from distances on the sphere, continued monotonically where θ + m exceeds π."""
    # sin θ is computed from the chord: computed from the cosine, it would have infinite slopes.
    cosine = similarity(distances)
    below = cosine > -jnp.cos(margin)
    squares = jnp.where(below, distances, 1)
    sine = SPHERE.length(squares) * jnp.sqrt(1 - squares / 4)
    shifted = cosine * jnp.cos(margin) - sine * jnp.sin(margin)
    return jnp.where(below, shifted, cosine - margin * jnp.sin(margin))


def _cross_entropy(logits: Float[Array, "n classes"], same: Bool[Array, "n classes"]) -> Loss:
    """Mean cross-entropy, written as log(1 + Σ exp(other − same)) to keep small losses' digits."""
    target = jnp.sum(logits, axis=1, keepdims=True, where=same)
    return jnp.mean(log1p_sum_exp(logits - target, ~same, axis=1))


def _spread(space: Space, proxies: Float[Array, "classes centres dim"]) -> Float[Array, ""]:
    """Regularisation of `soft_triple`; coincident centres have gradient 0."""
    classes, centres, _ = proxies.shape
    first, second = np.triu_indices(centres, k=1)
    separations = space.separation(proxies[:, first], proxies[:, second])
    apart = separations > 0
    roots = jnp.sqrt(jnp.where(apart, separations, 1))
    return jnp.sum(roots, where=apart) / (classes * centres * (centres - 1))


# Parameters of proxies are free vectors, which Adam moves, or points of the ball, which Riemannian
# Adam moves. If the ball's c is learned, the points are stored as tangent vectors
# `poincare.logmap0`(x, c): they keep their distances from the origin while c changes.
_Vectors = Float[Array, "*b dim"]


def proxy_ball_c(field: str, fields: Mapping[str, Any], space: Space) -> BallC:
    """The proxies' `Group.ball_c`, from their optimiser `config.objective[field]`."""
    if fields[field] == "adam":
        return None
    if (ball := space.ball()) is None:
        rule = "must be adam unless objective.space is poincare or lorentz"
        raise UserError(f"config.objective.{field} is {fields[field]}; it {rule}")
    return LEARNED if fields["learn_c"] else float(ball.c)


def proxy_parameters(vectors: _Vectors, space: Space, ball_c: BallC) -> _Vectors:
    """Converts free vectors to parameters of the proxies that `space.embed` makes of them."""
    ball = space.ball()
    if ball is None or ball_c is None:
        return vectors
    points = space.to_ball(space.embed(vectors))
    return poincare.logmap0(points, ball.c) if ball_c == LEARNED else points


def proxy_points(parameters: _Vectors, space: Space, ball_c: BallC) -> _Vectors:
    """Converts the parameters of proxies to points of the space."""
    if ball_c is None:
        return space.embed(parameters)
    return space.from_tangent(parameters) if ball_c == LEARNED else space.from_ball(parameters)


@dataclasses.dataclass(frozen=True)
class ProxyObjective(Objective):
    """A loss between the images of a batch and proxies of all classes.

    Proxies start normally distributed before the space embeds them, with variance 2 / (number of
    proxies), as in Proxy-Anchor (Kim et al., CVPR 2020): Kaiming initialisation with a classifier's
    fan-out.
    """

    space: Space
    function: Callable[..., Array]  # The loss, with its settings.
    centres: int | None  # Proxies of each class; None for one proxy, without an axis of centres.
    rate: float  # Factor of the proxies' learning rate.
    ball_c: BallC  # `Group.ball_c` of the proxies.
    samples_per_class: int | None  # None if images are not grouped by class.

    @property
    def groups(self) -> Sequence[Group]:  # type: ignore[override]
        """The proxies, with their learning rate."""
        return (Group(("proxies",), self.rate, ball_c=self.ball_c),)

    def init(self, key: PRNGKeyArray, spec: ProblemSizes) -> tuple[dict, dict]:
        """Returns random proxies, and no state."""
        centres = () if self.centres is None else (self.centres,)
        deviation = (2 / (spec.classes * (self.centres or 1))) ** 0.5
        proxies = jax.random.normal(key, (spec.classes, *centres, spec.head_dim)) * deviation
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
    "proxy_rate": Field(100.0, at_least(0)),  # As in Proxy-Anchor and SoftTriple.
    # 'riemannian': proxies are points of a hyperbolic space, which Riemannian Adam moves.
    "proxy_optimizer": Field("adam", one_of("adam", "riemannian")),
}


def _create(function: Callable[..., Array], settings: LossSettings, space: Space) -> ProxyObjective:
    return ProxyObjective(
        space,
        function,
        centres=settings.fields.get("centres"),
        rate=settings.fields["proxy_rate"],
        ball_c=proxy_ball_c("proxy_optimizer", settings.fields, space),
        samples_per_class=settings.adjacent_samples,
    )


def _centres(default: int) -> dict[str, Field]:
    """Fields of a loss with several proxies for each class."""
    return {"centres": Field(default, within(1, 10**4)), **_SHARED}


proxy_loss = functools.partial(declare, build=_create)
_softmax_loss = functools.partial(
    proxy_loss, rules={"temperature": ABOVE_0}, learnable=("temperature",), shared=_SHARED
)
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
    "proxy_nca": _softmax_loss(proxy_nca, variant="nca"),
    "normalized_softmax": _softmax_loss(normalized_softmax, variant="softmax"),
    "soft_triple": proxy_loss(
        soft_triple,
        {"scale": ABOVE_0, "gamma": ABOVE_0, "margin": at_least(0), "regularization": at_least(0)},
        learnable=("scale",),
        shared=_centres(10),
        variant="softtriple",
    ),
}
