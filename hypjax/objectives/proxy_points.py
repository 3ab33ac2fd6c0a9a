"""Parameters of proxies: free vectors, points of the ball, or tangent vectors at its origin.

Adam moves free vectors. Riemannian Adam moves points if c is fixed, and tangent vectors
`poincare.logmap0`(x, c) if c is learned: a proxy then keeps its distance from the origin while c
changes, and the gradient by c is taken at a fixed tangent vector.
"""

from collections.abc import Mapping
from typing import Any

from jaxtyping import Array, Float

from hypjax.errors import UserError
from hypjax.geometry import Space, poincare
from hypjax.objectives.base import LEARNED

_Vectors = Float[Array, "*b dim"]
_BallC = float | str | None


def ball_of_proxies(field: str, fields: Mapping[str, Any], space: Space) -> _BallC:
    """The proxies' `Group.ball_c`, from their optimiser `config.objective[field]`."""
    if fields[field] == "adam":
        return None
    if (ball := space.ball()) is None:
        rule = "must be adam unless objective.space is poincare or lorentz"
        raise UserError(f"config.objective.{field} is {fields[field]}; it {rule}")
    return LEARNED if fields["learn_c"] else ball.c


def proxy_parameters(vectors: _Vectors, space: Space, ball_c: _BallC) -> _Vectors:
    """Parameters of the proxies that `space.embed` makes of free vectors."""
    if ball_c is None:
        return vectors
    points = space.to_ball(space.embed(vectors))
    return poincare.logmap0(points, space.ball().c) if ball_c == LEARNED else points


def proxy_points(parameters: _Vectors, space: Space, ball_c: _BallC) -> _Vectors:
    """Converts the parameters of proxies to points of the space."""
    if ball_c is None:
        return space.embed(parameters)
    return space.from_tangent(parameters) if ball_c == LEARNED else space.from_ball(parameters)
