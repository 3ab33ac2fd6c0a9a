"""Parameters of proxies: free vectors, points of the ball, or tangent vectors at its origin.

Free vectors are for Adam, the others for Riemannian Adam: points for a fixed c, tangent vectors
`poincare.logmap0`(x, c) for a learned one. While c changes, a proxy then keeps its distance from
the origin; the gradient by c is also taken at a fixed tangent vector.
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
    """Returns the proxies' `Group.ball_c`; their optimiser is `config.objective[field]`."""
    if fields[field] == "adam":
        return None
    if (ball := space.ball()) is None:
        rule = "must be adam unless objective.space is a ball or lorentz"
        raise UserError(f"config.objective.{field} {rule}")
    return LEARNED if fields["learn_c"] else ball.c


def proxy_parameters(vectors: _Vectors, space: Space, ball_c: _BallC) -> _Vectors:
    """Converts free vectors to the parameters of the proxies `space.embed(vectors)`."""
    if ball_c is None:
        return vectors
    points = space.to_ball(space.embed(vectors))
    return poincare.logmap0(points, space.ball().c) if ball_c == LEARNED else points


def proxy_points(parameters: _Vectors, space: Space, ball_c: _BallC) -> _Vectors:
    """Proxies as points of the space."""
    if ball_c is None:
        return space.embed(parameters)
    return space.from_tangent(parameters) if ball_c == LEARNED else space.from_ball(parameters)
