"""Riemannian Adam, for parameters that are points of the Poincaré ball."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, PyTree

from hypjax.geometry import poincare
from hypjax.geometry.arithmetic import Scalar

_Points = Float[Array, "*b dim"]


class RiemannianAdamState(NamedTuple):
    """The state of `riemannian_adam`."""

    count: Int[Array, ""]  # Number of updates.
    mean: PyTree  # First moments: tangent vectors at the parameters.
    square: PyTree  # Second moments: one number for each point.


def riemannian_adam(
    learning_rate: float | optax.Schedule,
    *,
    c: Scalar,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
) -> optax.GradientTransformation:
    """Adam on the ball (Bécigneul and Ganea, ICLR 2019), with the steps of geoopt's.

    The inverse metric turns a gradient into a tangent vector. A point's second moment averages the
    squared length of this vector. A step follows the geodesic, and the first moment is transported
    along it. Each array of the parameters holds points, [..., dim]; updates are differences of
    points, for `optax.apply_updates`. At c = 0 the metric is the ball's limit, 4·⟨u, v⟩.

    The learning rate is the length of a step under a constant gradient, or a schedule of it. `eps`
    is added to the root of the second moment. In a model with other parameters,
    `optax.multi_transform` says which arrays are points.
    """

    def init(params: PyTree) -> RiemannianAdamState:
        lengths = jax.tree.map(lambda x: jnp.zeros_like(x[..., :1]), params)
        zeros = jax.tree.map(jnp.zeros_like, params)
        return RiemannianAdamState(jnp.zeros([], jnp.int32), zeros, lengths)

    def update(
        gradient: PyTree, state: RiemannianAdamState, params: PyTree
    ) -> tuple[PyTree, RiemannianAdamState]:
        rate = learning_rate(state.count) if callable(learning_rate) else learning_rate
        count = state.count + 1
        corrections = 1 - b1**count, 1 - b2**count

        def move(x: _Points, g: _Points, mean: _Points, square: Array) -> tuple[Any, ...]:
            scale = poincare.lambda_x(x, c)
            g = g / scale**2
            mean = b1 * mean + (1 - b1) * g
            length = scale**2 * jnp.sum(g * g, axis=-1, keepdims=True)
            square = b2 * square + (1 - b2) * length
            root = jnp.sqrt(square / corrections[1]) + eps
            moved = poincare.expmap(x, -rate * mean / corrections[0] / root, c)
            moved = poincare.project(moved, c)
            return moved - x, poincare.transport(x, moved, mean, c), square

        moved = jax.tree.map(move, params, gradient, state.mean, state.square)
        updates, mean, square = (
            jax.tree.map(lambda _, parts, i=i: parts[i], params, moved) for i in range(3)
        )
        return updates, RiemannianAdamState(count, mean, square)

    return optax.GradientTransformation(init, update)
