"""The mathematics: spaces, and the functions on arrays under them."""

from hypjax.geometry import poincare
from hypjax.geometry.spaces import PoincareBall, Space, Sphere

__all__ = ["PoincareBall", "Space", "Sphere", "poincare"]
