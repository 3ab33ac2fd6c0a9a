"""The mathematics: spaces, and the functions on arrays under them."""

from hypjax.geometry import poincare
from hypjax.geometry.spaces import PoincareBall, SearchTerms, Space, Sphere

__all__ = ["PoincareBall", "SearchTerms", "Space", "Sphere", "poincare"]
