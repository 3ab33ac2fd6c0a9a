"""HIER: hierarchical proxies as common ancestors of images (Kim et al., CVPR 2023)."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from hypjax.fields import ABOVE_0, at_least, one_of, within
from hypjax.geometry import Lorentz, PoincareBall, Space, Sphere
from hypjax.geometry.arithmetic import AnyArray
from hypjax.objectives.base import (
    BallC,
    Create,
    Extension,
    Group,
    Landmarks,
    Loss,
    LossResult,
    LossSettings,
    ProblemSizes,
    setting,
)
from hypjax.objectives.comparisons import mean_where, norms
from hypjax.objectives.proxy_losses import proxy_ball_c, proxy_parameters, proxy_points
from hypjax.types import Batch, Outputs


class Triplets(NamedTuple):
    """Triplets (i, j, k) of points: i and j are related, k is not related to either."""

    indices: Int[Array, "t 3"]
    valid: Bool[Array, " t"]  # Whether a row is a triplet; other rows are padding.


def hier(
    points: Float[AnyArray, "n dim"],
    proxies: Float[AnyArray, "p dim"],
    triplets: Int[AnyArray, "t 3"],
    noise: Float[AnyArray, "2 t p"],
    *,
    space: Space,
    margin: float = 0.1,
    temperature: float = 0.1,
    valid: Bool[AnyArray, " t"] | None = None,
) -> Float[Array, ""]:
    """Loss of triplets and their lowest common ancestors among proxies (HIER, Section 3).

    The ancestor ρ_ij of i and j is the proxy p with the largest −max(d(i, p), d(j, p)) / τ + noise;
    the ancestor ρ_ijk of all three is chosen in the same way. A triplet's loss is

        [d(i, ρ_ij) − d(i, ρ_ijk) + δ]₊ + [d(j, ρ_ij) − d(j, ρ_ijk) + δ]₊
        + [d(k, ρ_ijk) − d(k, ρ_ij) + δ]₊,

    or 0 if both ancestors are the same proxy. Gradients pass through the choice of ancestors as
    through a softmax (straight-through Gumbel softmax). The loss is the mean over `valid` triplets,
    by default all triplets; if no triplet is valid, it is 0.

    Points and proxies lie in the space. Triplets hold the indices i, j and k of points. `noise` is
    Gumbel noise, first for ρ_ij, then for ρ_ijk. `margin` is δ, and `temperature` τ > 0.
    """
    points, proxies, triplets = jnp.asarray(points), jnp.asarray(proxies), jnp.asarray(triplets)
    distances = space.distance_matrix(points, proxies)
    d_i, d_j, d_k = (distances[indices] for indices in triplets.T)
    farther = jnp.maximum(d_i, d_j)
    lca_ij = _choose(-farther / temperature + noise[0])
    lca_ijk = _choose(-jnp.maximum(farther, d_k) / temperature + noise[1])
    different = lca_ij[0] != lca_ijk[0]
    near_and_far = (d_i, lca_ij, lca_ijk), (d_j, lca_ij, lca_ijk), (d_k, lca_ijk, lca_ij)
    terms = [_distance_to(near, d) - _distance_to(far, d) for d, near, far in near_and_far]
    losses = sum(jax.nn.relu(term + margin) for term in terms)
    losses = jnp.where(different | jnp.isnan(losses), losses, 0)
    valid = jnp.ones(len(losses), bool) if valid is None else jnp.asarray(valid)
    return mean_where(losses, valid)


# The proxy that each triplet chooses, and zeros, with the gradient of the softmax over proxies.
_Choice = tuple[Int[Array, " t"], Float[Array, "t p"]]


def _choose(logits: Float[Array, "t p"]) -> _Choice:
    probabilities = jax.nn.softmax(logits)
    return jnp.argmax(logits, axis=1), probabilities - lax.stop_gradient(probabilities)


def _distance_to(choice: _Choice, distances: Float[Array, "t p"]) -> Float[Array, " t"]:
    """Distance to the chosen proxy, with the gradient of a product with its one-hot vector."""
    proxy, gradient = choice
    chosen = jnp.take_along_axis(distances, proxy[:, None], axis=1)[:, 0]
    return chosen + jnp.sum(lax.stop_gradient(distances) * gradient, axis=1)


def reciprocal_triplets(
    similarity: Float[AnyArray, "n n"],
    key: PRNGKeyArray,
    *,
    neighbors: int = 20,
    per_anchor: int = 50,
) -> Triplets:
    """Draws triplets whose first two points are mutual nearest neighbours (HIER, Section 3).

    A point's neighbours are the point itself and the most similar other points, `neighbors` in all.
    For each anchor i, `per_anchor` pairs (j, k) are drawn with replacement: j from its mutual
    neighbours, k from the points that are neither i nor its mutual neighbours. Triplets of an
    anchor with fewer than two mutual neighbours, or without any k, are not valid.
    """
    similarity = jnp.asarray(similarity)
    n = len(similarity)
    itself = jnp.eye(n, dtype=bool)
    nearest = lax.top_k(jnp.where(itself, jnp.inf, similarity), min(neighbors, n))[1]
    # Integers instead of booleans, whose product with a transpose takes XLA minutes to compile.
    is_nearest = nearest[:, 1:, None] == jnp.arange(n)[None, None]
    is_neighbor = jnp.any(is_nearest, axis=1).astype(jnp.int8)
    mutual = is_neighbor * is_neighbor.T > 0
    others = ~mutual & ~itself
    valid = (jnp.sum(mutual, axis=1) >= 2) & jnp.any(others, axis=1)
    j_key, k_key = jax.random.split(key)
    i = jnp.broadcast_to(jnp.arange(n)[:, None], (n, per_anchor))
    j = draw_columns(j_key, mutual, per_anchor)
    k = draw_columns(k_key, others, per_anchor)
    indices = jnp.stack([i, j, k], axis=-1).reshape(-1, 3)
    return Triplets(indices, jnp.repeat(valid, per_anchor))


def draw_columns(key: PRNGKeyArray, mask: Bool[Array, "n n"], count: int) -> Int[Array, "n count"]:
    """Draws `count` true columns of each row, with replacement; any column if none is true."""
    columns = jnp.argsort(~mask, axis=1, stable=True)  # True columns first.
    num_true = jnp.sum(mask, axis=1, keepdims=True)
    drawn = jax.random.randint(key, (len(mask), count), 0, jnp.maximum(num_true, 1))
    return jnp.take_along_axis(columns, drawn, axis=1)


@dataclasses.dataclass(frozen=True)
class Hier(Extension):
    """Adds HIER's loss in a hyperbolic space to a base loss of the embeddings' angles.

    `hier` is computed for triplets of images, where images of one class are the most similar, and
    for triplets of the hierarchical proxies. As in the authors' code, the base loss takes the
    angles of the space's points, so the ball's inverse metric, (1 − c‖x‖²)²/4, scales the gradients
    of both losses on their way to the head.
    """

    prefix = "hier_"
    one_ball = True
    head_space: PoincareBall | Lorentz  # Space of the head's outputs, in evaluation.
    weight: float = setting(0.5, at_least(0))  # λ: weight of the triplet loss.
    proxies: int = setting(512, within(1, 10**6))  # Number of hierarchical proxies.
    neighbors: int = setting(20, within(3, 10**6))  # K, including the anchor.
    triplets: int = setting(50, within(1, 10**6))  # Triplets of each anchor.
    margin: float = setting(0.1, at_least(0))  # δ.
    # τ, which divides distances before noise is added, from the authors' code; the paper has no τ.
    temperature: float = setting(0.1, ABOVE_0)
    rate: float = setting(50.0, at_least(0))  # Factor of the proxies' learning rate.
    # 'adam': gradients are scaled by the inverse metric, as in the authors' code; 'riemannian':
    # proxies are points, which Riemannian Adam moves.
    optimizer: str = setting("adam", one_of("adam", "riemannian"))
    # Weight decay of the proxies. None: the optimiser's for vectors, no decay for points.
    decay: float | None = setting(None, at_least(0), kind=float, optional=True)
    ball_c: BallC = None  # `Group.ball_c` of the hierarchical proxies.

    @classmethod
    def create(cls, create_base: Create, settings: LossSettings, space: Space) -> Extension:
        """Builds a run's objective; `create_base` builds the base, a loss of angles."""
        ball_c = proxy_ball_c("hier_optimizer", settings.fields, space)
        assert isinstance(space, PoincareBall | Lorentz)  # As the declaration says.
        base = create_base(settings, Sphere())
        return cls(base, head_space=space, ball_c=ball_c, **cls.configured(settings))

    @property
    def space(self) -> PoincareBall | Lorentz:  # type: ignore[override]
        """The head's space, with gradients of features scaled by the inverse metric."""
        return dataclasses.replace(self.head_space, riemannian=True)

    score_space = property(lambda self: self.head_space)

    def with_scalars(self, scalars: Mapping[str, Any]) -> "Hier":
        """Replaces the scalars of the base and the space."""
        head_space = self.head_space.with_scalars(scalars)
        return dataclasses.replace(
            self, base=self.base.with_scalars(scalars), head_space=head_space
        )

    @property
    def groups(self) -> Sequence[Group]:  # type: ignore[override]
        """The base's groups, and the hierarchical proxies."""
        return (*super().groups, Group(("hierarchy",), self.rate, self.decay, ball_c=self.ball_c))

    @property
    def landmarks(self) -> Landmarks:  # type: ignore[override]
        """The hierarchical proxies."""
        space, ball_c = self.head_space, self.ball_c
        return Landmarks(
            "hierarchy",
            self.proxies,
            parameters=lambda vectors: proxy_parameters(vectors, space, ball_c),
            points=lambda parameters: proxy_points(parameters, space, ball_c),
        )

    def init(self, key: PRNGKeyArray, spec: ProblemSizes) -> tuple[dict, dict]:
        """Returns the base loss's parameters with random hierarchical proxies, and its state.

        Before the space embeds them, proxies are normally distributed, with norms of about 0.9
        times the clip radius, or 0.9 without clipping.
        """
        base_key, proxy_key = jax.random.split(key)
        params, state = self.base.init(base_key, spec)
        norm = 0.9 * (self.head_space.clip_radius or 1.0)
        proxies = jax.random.normal(proxy_key, (self.proxies, spec.head_dim))
        proxies = proxies * (norm / spec.head_dim**0.5)
        return {"base": params, "hierarchy": self.landmarks.parameters(proxies)}, state

    def loss(
        self, params: dict, outputs: Outputs, batch: Batch, key: PRNGKeyArray, **others: Any
    ) -> LossResult:
        """Loss of a batch, see `Objective.loss`."""
        base_key, image_key, proxy_key = jax.random.split(key, 3)
        points = self.space.embed(outputs.projected)
        proxies = proxy_points(params["hierarchy"], self.space, self.ball_c)
        # Points have the angles of the outputs, but their gradients pass through the space.
        angles = outputs._replace(projected=points)
        loss, (state, metrics) = self.base_loss(
            params=params["base"], outputs=angles, batch=batch, key=base_key, **others
        )
        labels = jnp.asarray(batch.labels)
        same_class = labels[:, None] == labels[None]
        image_loss, image_anchors = self._triplet_loss(points, proxies, same_class, image_key)
        itself = jnp.eye(self.proxies, dtype=bool)
        proxy_loss, proxy_anchors = self._triplet_loss(proxies, proxies, itself, proxy_key)
        metrics |= norms(self.head_space, *lax.stop_gradient((outputs.projected, points)))
        metrics |= {
            "hier_loss": image_loss + proxy_loss,
            "hier_anchors": image_anchors,
            "hier_proxy_anchors": proxy_anchors,
            "hier_proxy_norm": jnp.mean(jnp.linalg.norm(proxies, axis=-1)),
        }
        return loss + self.weight * (image_loss + proxy_loss), (state, metrics)

    def _triplet_loss(
        self,
        points: Float[Array, "n dim"],
        proxies: Float[Array, "p dim"],
        same: Bool[Array, "n n"],
        key: PRNGKeyArray,
    ) -> tuple[Loss, Float[Array, ""]]:
        """Loss over random triplets of points, and the share of points that are anchors.

        `same` marks pairs of points that are more similar than all other pairs.
        """
        triplet_key, noise_key = jax.random.split(key)
        distances = lax.stop_gradient(self.space.distance_matrix(points, points))
        similarity = jnp.exp(-distances) + same.astype(distances.dtype)
        triplets = reciprocal_triplets(
            similarity, triplet_key, neighbors=self.neighbors, per_anchor=self.triplets
        )
        noise = jax.random.gumbel(noise_key, (2, len(triplets.indices), len(proxies)))
        loss = hier(
            points,
            proxies,
            triplets.indices,
            noise,
            space=self.space,
            margin=self.margin,
            temperature=self.temperature,
            valid=triplets.valid,
        )
        return loss, jnp.mean(triplets.valid)
