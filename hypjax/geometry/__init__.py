"""Geometry: spaces, and the pure functions on arrays behind them."""

from hypjax.geometry import cones as cones
from hypjax.geometry import lorentz as lorentz
from hypjax.geometry import poincare as poincare
from hypjax.geometry.fused import Composite as Composite
from hypjax.geometry.fused import Fused as Fused
from hypjax.geometry.fused import Product as Product
from hypjax.geometry.hyperbolic import Lorentz as Lorentz
from hypjax.geometry.hyperbolic import PoincareBall as PoincareBall
from hypjax.geometry.registry import SPACES as SPACES
from hypjax.geometry.registry import register_space as register_space
from hypjax.geometry.spaces import InnerProductSpace as InnerProductSpace
from hypjax.geometry.spaces import SearchTerms as SearchTerms
from hypjax.geometry.spaces import Space as Space
from hypjax.geometry.sphere import Sphere as Sphere
