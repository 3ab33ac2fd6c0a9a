"""Proxies as parameters: free vectors, points of a ball, or tangent vectors at its origin."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxtyping import Array, Float

from hypjax.errors import UserError
from hypjax.geometry import Space, poincare
from hypjax.objectives.base import Group

_Vectors = Float[Array, "*b dim"]


@dataclasses.dataclass(frozen=True)
class ProxyPoints:
    """How parameters stand for proxies.

    Free vectors are embedded like features, and the run's optimiser changes them. The others are
    moved by Riemannian Adam. They are points of the space's ball, or, where c is learned, tangent
    vectors at its origin, v = `poincare.logmap0`(x, c): while c changes, such a proxy keeps its
    distance from the origin, and the gradient by c takes that into account.
    """

    riemannian: bool = False
    learned_c: bool = False

    @property
    def tangent(self) -> bool:
        """Whether parameters are tangent vectors at the origin."""
        return self.riemannian and self.learned_c

    def group(self, name: str, space: Space, **settings: Any) -> Group:
        """The group of the parameters with this name."""
        ball_c = space.ball().c if self.riemannian and not self.learned_c else None
        return Group((name,), ball_c=ball_c, tangent=self.tangent, **settings)

    def parameters(self, vectors: _Vectors, space: Space) -> _Vectors:
        """Parameters of the proxies that a space embeds from free vectors."""
        if not self.riemannian:
            return vectors
        points = space.to_ball(space.embed(vectors))
        return poincare.logmap0(points, space.ball().c) if self.learned_c else points

    def points(self, parameters: _Vectors, space: Space) -> _Vectors:
        """Proxies as points of the space."""
        if self.tangent:
            return space.from_tangent(parameters)
        return space.from_ball(parameters) if self.riemannian else space.embed(parameters)


def proxy_points(field: str, fields: Mapping[str, Any], space: Space) -> ProxyPoints:
    """How the field of `config.objective` that names the proxies' optimiser wants them."""
    kind = ProxyPoints(fields[field] == "riemannian", fields["learn_c"])
    if kind.riemannian and space.ball() is None:
        raise UserError(
            f"config.objective.{field} must be adam unless objective.space is a ball or lorentz"
        )
    return kind
