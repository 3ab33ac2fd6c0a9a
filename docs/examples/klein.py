"""The Klein model of hyperbolic space."""

import dataclasses

import jax.numpy as jnp

from hypjax.geometry.hyperbolic import Lorentz
from hypjax.geometry.spaces import InnerProductSpace, pytree


@pytree
@dataclasses.dataclass(frozen=True)
class Klein(InnerProductSpace):
    """The points x/√(1 + c‖x‖²) of the ball of radius 1/√c, for the points x of `Lorentz(c)`."""

    c: float = 0.1
    clip_radius: float | None = dataclasses.field(default=2.3, metadata={"static": True})

    @property
    def lorentz(self):
        return Lorentz(self.c, self.clip_radius)

    def lower(self, x):
        return x / jnp.sqrt(1 + self.c * jnp.sum(x * x, axis=-1, keepdims=True))

    def lift(self, x):
        return x / jnp.sqrt(1 - self.c * jnp.sum(x * x, axis=-1, keepdims=True))

    def embed(self, features):
        return self.lower(self.lorentz.embed(features))

    def clipped(self, features):
        return self.lorentz.clipped(features)

    def features(self, x):
        return self.lorentz.features(self.lift(x))

    def mean(self, x, weights=None):
        return self.lower(self.lorentz.mean(self.lift(x), weights))

    def distance(self, x, y):
        return self.lorentz.distance(self.lift(x), self.lift(y))

    def distance_matrix(self, x, y):
        return self.lorentz.distance_matrix(self.lift(x), self.lift(y))

    def separation(self, x, y):
        return self.lorentz.separation(self.lift(x), self.lift(y))

    def distance_at(self, separation):
        return self.lorentz.distance_at(separation)

    def search_vectors(self, x, role):
        return self.lorentz.search_vectors(self.lift(x), role)

    def search_terms(self, x, centre):
        return self.lorentz.search_terms(self.lift(x), self.lift(centre))

    def ball(self):
        return self.lorentz.ball()

    def to_ball(self, x):
        return self.lorentz.to_ball(self.lift(x))

    def from_ball(self, x):
        return self.lower(self.lorentz.from_ball(x))

    def flaws(self, x):
        return {"is not inside the ball": ~(self.c * jnp.sum(x * x, axis=-1) < 1)}
