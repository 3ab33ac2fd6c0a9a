"""Geometry: spaces, and the pure functions on arrays behind them."""

from hypjax.geometry import poincare
from hypjax.geometry.fused import Fused
from hypjax.geometry.space import InnerProductSpace, SearchTerms, Space
from hypjax.geometry.spaces import SPACES, PoincareBall, Sphere

__all__ = [
    "SPACES",
    "Fused",
    "InnerProductSpace",
    "PoincareBall",
    "SearchTerms",
    "Space",
    "Sphere",
    "poincare",
]
