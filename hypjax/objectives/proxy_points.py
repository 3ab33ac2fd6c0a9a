"""Proxies as parameters: free vectors, or what Riemannian Adam moves, see `Group.ball_c`.

Tangent vectors at the origin, `poincare.logmap0`(x, c), stand for points x where c is learned:
while c changes, proxies keep their distance from the origin, in the gradient by c, too.
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
    """The `Group.ball_c` of proxies, whose optimiser the field of `config.objective` names."""
    if fields[field] == "adam":
        return None
    if (ball := space.ball()) is None:
        rule = "must be adam unless objective.space is a ball or lorentz"
        raise UserError(f"config.objective.{field} {rule}")
    return LEARNED if fields["learn_c"] else ball.c


def proxy_parameters(vectors: _Vectors, space: Space, ball_c: _BallC) -> _Vectors:
    """Parameters of the proxies that a space embeds from free vectors."""
    if ball_c is None:
        return vectors
    points = space.to_ball(space.embed(vectors))
    return poincare.logmap0(points, space.ball().c) if ball_c == LEARNED else points


def proxy_points(parameters: _Vectors, space: Space, ball_c: _BallC) -> _Vectors:
    """Proxies as points of the space."""
    if ball_c is None:
        return space.embed(parameters)
    return space.from_tangent(parameters) if ball_c == LEARNED else space.from_ball(parameters)
