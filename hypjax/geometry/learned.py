"""Learned curvature: the parameters of a space, and what the space makes of them.

A model holds them beside its encoder and its head, as params["space"] = {"log_c": log c}, float32.
The logarithm keeps c above 0, and a step of the optimiser changes c by a factor wherever it is, as
in MERU (Desai et al., ICML 2023, Section 3). Losses, scores and searches all get their space from
`space_at`.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from hypjax.geometry.spaces import Space

SpaceParameters = Mapping[str, Float[Array, ""]]  # {"log_c": ...}
_Space = TypeVar("_Space", bound=Space)


def has_curvature(space: type[Space]) -> bool:
    """Whether the instances of a space have a curvature c."""
    return "c" in {field.name for field in dataclasses.fields(space)}


def first_parameters(c: float) -> dict[str, Float[Array, ""]]:
    """The parameters of a space before training, at the curvature c > 0."""
    return {"log_c": jnp.float32(math.log(c))}


def space_at(space: _Space, params: SpaceParameters | None) -> _Space:
    """A space with the curvature that parameters hold.

    Without parameters, or of a space without c, it is the given space. Traced parameters give a
    traced c, and others a number, see `curvature`. Either is a leaf of the space, so that a program
    which takes the space as an argument is compiled once for all its values.
    """
    if params is None or not has_curvature(type(space)):
        return space
    traced = isinstance(params["log_c"], jax.core.Tracer)
    c = jnp.exp(params["log_c"]) if traced else curvature(params)
    return dataclasses.replace(space, c=c)


def curvature(params: SpaceParameters) -> float:
    """The learned c, as the shortest decimal number that rounds to its float32 value."""
    return float(str(np.float32(np.exp(np.float64(params["log_c"])))))


def projected(params: SpaceParameters, bounds: tuple[float, float]) -> SpaceParameters:
    """Moves c to the nearer of two bounds if it is outside.

    It is applied to the parameters, after an update. A loss that clipped c itself would have no
    gradient outside the bounds, where c would then remain.
    """
    low, high = map(math.log, bounds)
    return {**params, "log_c": jnp.clip(params["log_c"], low, high)}
