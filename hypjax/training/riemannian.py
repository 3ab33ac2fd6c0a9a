"""Riemannian Adam and AdamW, for parameters that are points of the Poincaré ball."""

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

    count: Int[Array, ""]  # type: ignore[assignment]  # Number of updates; as optax names it.
    mean: PyTree  # First moments: tangent vectors at the points, or at the origin.
    square: PyTree  # Second moments: one number for each point.


def riemannian_adam(
    learning_rate: float | optax.Schedule,
    *,
    c: Scalar | None,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
) -> optax.GradientTransformationExtraArgs:
    """Adam on the Poincaré ball (Bécigneul and Ganea, ICLR 2019), with the same steps as geoopt.

    The inverse metric turns a gradient into a tangent vector. A point's second moment averages the
    squared length of this vector. A step follows the geodesic, and the first moment is transported
    along the step. Each array of the parameters holds points, [..., dim]; updates are differences
    of points, for `optax.apply_updates`. At c = 0 the metric is the ball's limit, 4·⟨u, v⟩.

    The learning rate is the geodesic length of a step under a constant gradient. `eps` is added to
    the root of the second moment. Select a model's arrays of points by `optax.multi_transform`.

    `c=None` is for a learned c, which `update` then takes as a keyword. Parameters are tangent
    vectors at the origin, v = `poincare.logmap0`(x, c), and first moments are transported to the
    origin, so neither depends on c. This is the scheme of Bdeir et al. (arXiv 2405.13979, versions
    1 and 2): parameters move at the old c; then c changes, and points and moments are carried
    through the origin. Their code leaves out the moments, and the gradient of c through the points.

    A `weight_decay` λ above 0 gives Riemannian AdamW (Bdeir et al.; experimental): before its step,
    a point moves to its centroid with the origin, in which the origin has the weight
    min(learning rate · λ, 1), see `poincare.shrink`. Gradient and moment are transported to the
    centroid; the authors' code does not transport them.
    """

    def init(params: PyTree) -> RiemannianAdamState:
        mean = jax.tree.map(jnp.zeros_like, params)
        square = jax.tree.map(lambda x: jnp.zeros_like(x[..., :1]), params)
        return RiemannianAdamState(jnp.zeros([], jnp.int32), mean, square)

    def update(
        gradient: PyTree, state: RiemannianAdamState, params: PyTree, **options: Any
    ) -> tuple[PyTree, RiemannianAdamState]:
        rate = learning_rate(state.count) if callable(learning_rate) else learning_rate
        count = state.count + 1
        mean_correction, square_correction = 1 - b1**count, 1 - b2**count
        ball_c = options["c"] if c is None else c

        def move(start: _Points, g: _Points, mean: _Points, square: Array) -> tuple[Any, ...]:
            """Returns a point's change and its new moments, for a gradient g."""
            x = start
            scale = poincare.lambda_x(x, ball_c)
            g = g / scale**2
            if weight_decay:
                x = poincare.shrink(start, jnp.minimum(rate * weight_decay, 1), ball_c)
                g, mean = (poincare.transport(start, x, vector, ball_c) for vector in (g, mean))
                scale = poincare.lambda_x(x, ball_c)
            mean = b1 * mean + (1 - b1) * g
            square_norm = scale**2 * jnp.sum(g * g, axis=-1, keepdims=True)
            square = b2 * square + (1 - b2) * square_norm
            root = jnp.sqrt(square / square_correction) + eps
            moved = poincare.expmap(x, -rate * mean / mean_correction / root, ball_c)
            moved = poincare.project(moved, ball_c)
            return moved - start, poincare.transport(x, moved, mean, ball_c), square

        def move_tangent(v: _Points, g: _Points, mean: _Points, square: Array) -> tuple[Any, ...]:
            """Moves the point of a tangent vector v by `move`."""
            origin, x = jnp.zeros_like(v), poincare.project(poincare.expmap0(v, ball_c), ball_c)
            logarithm, pull_back = jax.vjp(lambda x: poincare.logmap0(x, ball_c), x)
            mean = poincare.transport(origin, x, mean, ball_c)
            (gradient_of_x,) = pull_back(g)
            change, mean, square = move(x, gradient_of_x, mean, square)
            mean = poincare.transport(x + change, origin, mean, ball_c)
            # Near the boundary, v itself differs from logmap0(x) by large rounding errors.
            return poincare.logmap0(x + change, ball_c) - logarithm, mean, square

        step = move_tangent if c is None else move
        results = jax.tree.map(step, params, gradient, state.mean, state.square)

        def tree_of(index: int) -> PyTree:
            return jax.tree.map(lambda _, result: result[index], params, results)

        return tree_of(0), RiemannianAdamState(count, mean=tree_of(1), square=tree_of(2))

    return optax.GradientTransformationExtraArgs(init, update)
