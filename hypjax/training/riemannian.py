"""Riemannian Adam and AdamW, for parameters that are points of the Poincaré ball.

If c is learned, parameters are tangent vectors at the origin, v = `poincare.logmap0`(x, c), and so
are first moments, transported to the origin. A step takes both to the ball of the step's c, moves
the points there, and takes them back. So neither changes while c does. That is the schema of Bdeir
et al. (arXiv 2405.13979, versions 1 and 2): all parameters move at the old c, then c, and then each
point is carried to the new c with its distance from the origin, and its moment by transport to the
origin and back. The authors learn K = 1/c by itself, hypjax log c; their released copies of the
code leave the moments behind.
"""

import functools
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
    """Adam on the ball (Bécigneul and Ganea, ICLR 2019), with the steps of geoopt's.

    The inverse metric turns a gradient into a tangent vector. A point's second moment averages the
    squared length of this vector. A step follows the geodesic, and the first moment is transported
    along it. Each array of the parameters holds points, [..., dim]; updates are differences of
    points, for `optax.apply_updates`. At c = 0 the metric is the ball's limit, 4·⟨u, v⟩.

    The learning rate is the length of a step under a constant gradient, or a schedule of it. `eps`
    is added to the root of the second moment. In a model with other parameters,
    `optax.multi_transform` says which arrays are points.

    With `c=None`, parameters are tangent vectors at the origin, see above, and `update` takes the
    curvature of the step as its argument `c`, which may be traced.

    `weight_decay` λ makes it Riemannian AdamW (Bdeir et al.; experimental, by code of their group):
    before its step, a point becomes its centroid with the origin, whose weight is the learning rate
    times λ, at most 1, see `poincare.shrink`. Gradient and moment are transported along; that code
    leaves them at the old point.
    """
    step_of = _moved_tangent if c is None else _moved

    def init(params: PyTree) -> RiemannianAdamState:
        lengths = jax.tree.map(lambda x: jnp.zeros_like(x[..., :1]), params)
        zeros = jax.tree.map(jnp.zeros_like, params)
        return RiemannianAdamState(jnp.zeros([], jnp.int32), zeros, lengths)

    def update(
        gradient: PyTree, state: RiemannianAdamState, params: PyTree, **options: Any
    ) -> tuple[PyTree, RiemannianAdamState]:
        rate = learning_rate(state.count) if callable(learning_rate) else learning_rate
        count = state.count + 1
        corrections = 1 - b1**count, 1 - b2**count
        at = options["c"] if c is None else c
        step = functools.partial(step_of, _Step(at, rate, weight_decay, b1, b2, eps, corrections))
        moved = jax.tree.map(step, params, gradient, state.mean, state.square)
        updates, mean, square = (
            jax.tree.map(lambda _, parts, i=i: parts[i], params, moved) for i in range(3)
        )
        return updates, RiemannianAdamState(count, mean, square)

    return optax.GradientTransformationExtraArgs(init, update)


class _Step(NamedTuple):
    """What a step of all points shares."""

    c: Scalar
    rate: Scalar
    weight_decay: float
    b1: float
    b2: float
    eps: float
    corrections: tuple[Scalar, Scalar]  # Of the moments' bias.


# A change, and the next moments.
_Moved = tuple[_Points, _Points, Float[Array, "*b 1"]]


def _moved(step: _Step, start: _Points, g: _Points, mean: _Points, square: Array) -> _Moved:
    """Moves points of the ball, whose moments are tangent vectors at them."""
    x, c = start, step.c
    scale = poincare.lambda_x(x, c)
    g = g / scale**2
    if step.weight_decay:
        x = poincare.shrink(start, jnp.minimum(step.rate * step.weight_decay, 1), c)
        g, mean = (poincare.transport(start, x, vector, c) for vector in (g, mean))
        scale = poincare.lambda_x(x, c)
    mean = step.b1 * mean + (1 - step.b1) * g
    length = scale**2 * jnp.sum(g * g, axis=-1, keepdims=True)
    square = step.b2 * square + (1 - step.b2) * length
    root = jnp.sqrt(square / step.corrections[1]) + step.eps
    moved = poincare.expmap(x, -step.rate * mean / step.corrections[0] / root, c)
    moved = poincare.project(moved, c)
    return moved - start, poincare.transport(x, moved, mean, c), square


def _moved_tangent(step: _Step, v: _Points, g: _Points, mean: _Points, square: Array) -> _Moved:
    """Moves points by their tangent vectors at the origin, where moments are, too."""
    c, origin = step.c, jnp.zeros_like(v)
    x = poincare.project(poincare.expmap0(v, c), c)
    logarithm, pull_back = jax.vjp(lambda x: poincare.logmap0(x, c), x)
    (g,) = pull_back(g)
    change, mean, square = _moved(step, x, g, poincare.transport(origin, x, mean, c), square)
    moved = x + change
    mean = poincare.transport(moved, origin, mean, c)
    # From v, the difference would add the rounding errors of x, which grow towards the boundary.
    return poincare.logmap0(moved, c) - logarithm, mean, square
