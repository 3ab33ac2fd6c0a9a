"""Geometry: spaces, and the pure functions on arrays behind them."""

from hypjax.geometry import poincare
from hypjax.geometry.space import SearchTerms, Space
from hypjax.geometry.spaces import SPACES, PoincareBall, Sphere

__all__ = ["SPACES", "PoincareBall", "SearchTerms", "Space", "Sphere", "poincare"]
