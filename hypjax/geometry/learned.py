"""Learned scalars of an objective: curvatures, temperatures, and weights of distances.

They start from fields of `config.objective`. A model holds their logarithms beside its encoder and
its head: params["scalars"] = {"log_c": log c, ...}, float32. The logarithm keeps a scalar above 0,
and a step of the optimiser changes it by a factor wherever it is, as in MERU (Desai et al., ICML
2023, Section 3). Losses, scores and searches get the scalars from `scalar_values`, and replace
the scalars of an objective or a space by `with_scalars`.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from hypjax.geometry.spaces import Space

Scalars = Mapping[str, float | Sequence[float]]  # By the name of their field.
ScalarParameters = Mapping[str, Float[Array, "..."]]  # {"log_c": ...}
CURVATURES = ("c", "curvatures")  # Fields whose bounds and rate are `c_bounds` and `c_rate`.


def has_curvature(space: type[Space]) -> bool:
    """Whether the instances of a space have a curvature c."""
    return "c" in {field.name for field in dataclasses.fields(space)}


def initial_scalars(fields: Mapping[str, Any]) -> Scalars:
    """Learned scalars, above 0, as `config.objective` sets them before training."""
    curvature = "curvatures" if fields["curvatures"] else "c"
    names = (*((curvature,) if fields["learn_c"] else ()), *fields["learn"])
    return {name: fields[name] for name in names}


def bounds(fields: Mapping[str, Any]) -> Mapping[str, tuple[float, float]]:
    """Bounds of learned scalars: `c_bounds`; of others, a tenth and ten times the first value."""
    return {
        name: tuple(fields["c_bounds"]) if name in CURVATURES else (start / 10, start * 10)
        for name, start in initial_scalars(fields).items()
    }


def scalar_parameters(scalars: Scalars) -> dict[str, Float[Array, "..."]]:
    """Parameters of scalars above 0; several values of one name are a vector."""
    return {f"log_{name}": jnp.float32(np.log(start)) for name, start in scalars.items()}


def initial_parameters(scalars: Scalars) -> dict[str, ScalarParameters]:
    """The part "scalars" of a model's parameters before training; empty if none is learned."""
    return {"scalars": scalar_parameters(scalars)} if scalars else {}


def scalar_values(params: ScalarParameters) -> dict[str, Any]:
    """Values of scalars by name: floats, or tuples of floats for vectors.

    A float is the shortest decimal number that rounds to the float32 value. Traced parameters have
    traced values.
    """
    return {name.removeprefix("log_"): _value(log) for name, log in params.items()}


def learned_scalars(fields: Mapping[str, Any], params: PyTree) -> dict[str, Any]:
    """Values of the scalars that a model has learned; empty if `config.objective` learns none.

    A model without its scalars is a `KeyError`: their values before training would be wrong.
    """
    return scalar_values(params["scalars"]) if initial_scalars(fields) else {}


def named_scalars(params: ScalarParameters) -> dict[str, Any]:
    """Values for reports: each item of a vector has its own name, such as "curvatures_0"."""
    return {
        f"{name}_{i}" if several else name: scalar
        for name, value in scalar_values(params).items()
        for several in [np.ndim(value) > 0]
        for i, scalar in enumerate(value if several else [value])
    }


def _value(log: Float[Array, "..."]) -> Any:
    if isinstance(log, jax.core.Tracer):
        return jnp.exp(log)
    values = np.float32(np.exp(np.asarray(log, np.float64)))
    return tuple(float(str(x)) for x in values) if np.ndim(values) else float(str(values))


def within_bounds(
    params: ScalarParameters, bounds: Mapping[str, tuple[float, float]]
) -> ScalarParameters:
    """Clips scalars to their bounds, after an update.

    A loss that clipped c itself would have no gradient outside the bounds, so c would stay there.
    """
    log_bounds = {f"log_{name}": tuple(np.log(pair)) for name, pair in bounds.items()}
    return {name: jnp.clip(log, *log_bounds[name]) for name, log in params.items()}
