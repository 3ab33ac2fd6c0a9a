"""Geometry: spaces, and the pure functions on arrays behind them."""

from hypjax.geometry import poincare as poincare
from hypjax.geometry.spaces import SPACES as SPACES
from hypjax.geometry.spaces import Fused as Fused
from hypjax.geometry.spaces import InnerProductSpace as InnerProductSpace
from hypjax.geometry.spaces import PoincareBall as PoincareBall
from hypjax.geometry.spaces import SearchTerms as SearchTerms
from hypjax.geometry.spaces import Space as Space
from hypjax.geometry.spaces import Sphere as Sphere
from hypjax.geometry.spaces import register_space as register_space
