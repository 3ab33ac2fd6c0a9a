"""Geometry: spaces, and the pure functions on arrays behind them."""

from hypjax.geometry import poincare
from hypjax.geometry.spaces import (
    SPACES,
    Fused,
    InnerProductSpace,
    PoincareBall,
    SearchTerms,
    Space,
    Sphere,
)

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
