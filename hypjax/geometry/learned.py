"""Learned scalars of an objective: curvatures, temperatures, and weights of distances.

Scalars start from fields of `config.objective`. A model's parameters hold their logarithms, next to
encoder and head: params["scalars"] = {"log_c": log c, ...}, float32. The logarithm keeps a scalar
above 0, and makes each update multiply the scalar by a factor, as in MERU (Desai et al., ICML 2023,
Section 3). Losses, scores and searches read the scalars by `scalar_values`, and put them into an
objective or a space by `with_scalars`.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from hypjax.fields import Values
from hypjax.geometry.arithmetic import AnyArray

Scalars = Mapping[str, float | Sequence[float]]  # By the name of the field.
ScalarParameters = Mapping[str, Float[AnyArray, "..."]]  # {"log_c": ...}
Bounds = Mapping[str, tuple[float, float]]  # By the name of the field.
CURVATURES = ("c", "curvatures")  # Fields whose bounds and rate are `c_bounds` and `c_rate`.


def has_curvature(space: type) -> bool:
    """Whether spaces of this class have a curvature c."""
    return "c" in {field.name for field in dataclasses.fields(space)}


def initial_scalars(fields: Values) -> Scalars:
    """Initial values, above 0, of the scalars that `config.objective` makes learned."""
    names = list(fields["learn"])
    if fields["learn_c"]:
        names.insert(0, "curvatures" if fields["curvatures"] else "c")
    return {name: fields[name] for name in names}


def bounds(fields: Values) -> Bounds:
    """Bounds of learned scalars: `c_bounds` for curvatures, else 0.1 and 10 times the start."""
    return {
        name: tuple(fields["c_bounds"])
        if name in CURVATURES
        else (fields[name] / 10, fields[name] * 10)
        for name in initial_scalars(fields)
    }


def scalar_parameters(scalars: Scalars) -> dict[str, Float[Array, "..."]]:
    """Converts scalars to parameters, their logarithms; several values of a name are a vector."""
    return {f"log_{name}": jnp.float32(np.log(value)) for name, value in scalars.items()}


def initial_parameters(scalars: Scalars) -> dict[str, ScalarParameters]:
    """The initial entry "scalars" of a model's parameters; {} if no scalar is learned."""
    return {"scalars": scalar_parameters(scalars)} if scalars else {}


def scalar_values(params: ScalarParameters) -> dict[str, Any]:
    """Converts parameters to scalars by name: floats, tuples of floats, or traced values.

    Each float is the shortest decimal number that rounds to the parameter's float32 value.
    """
    return {name.removeprefix("log_"): _value(log) for name, log in params.items()}


def _value(log: Float[AnyArray, "..."]) -> Any:
    if isinstance(log, jax.core.Tracer):
        return jnp.exp(log)
    values = np.asarray(np.exp(np.asarray(log, np.float64)), np.float32)
    return tuple(float(str(x)) for x in values) if values.ndim else float(str(values))


def learned_scalars(fields: Values, params: PyTree) -> dict[str, Any]:
    """Scalars from a model's parameters; {} if `config.objective` learns none.

    Missing parameters are a `KeyError`, since the initial values would be wrong.
    """
    return scalar_values(params["scalars"]) if initial_scalars(fields) else {}


def named_scalars(params: ScalarParameters) -> dict[str, Any]:
    """Scalars for reports; each item of a vector has a name, such as "curvatures_0"."""
    named: dict[str, Any] = {}
    for name, value in scalar_values(params).items():
        if np.ndim(value):
            named |= {f"{name}_{index}": item for index, item in enumerate(value)}
        else:
            named[name] = value
    return named


def within_bounds(params: ScalarParameters, bounds: Bounds) -> ScalarParameters:
    """Clips updated parameters so that their scalars are within bounds.

    If the loss clipped c instead, c would have no gradient outside the bounds, and stay there.
    """
    log_bounds = {f"log_{name}": tuple(np.log(pair)) for name, pair in bounds.items()}
    return {name: jnp.clip(log, *log_bounds[name]) for name, log in params.items()}
