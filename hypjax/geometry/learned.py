"""Numbers of an objective that are learned: curvatures, temperatures, and weights of distances.

A model holds their logarithms beside its encoder and its head, as params["scalars"] = {"log_c": log
c, ...}, float32, by the names of the fields of `config.objective` that say where they start. The
logarithm keeps a number above 0, and a step of the optimiser changes it by a factor wherever it is,
as in MERU (Desai et al., ICML 2023, Section 3). Losses, scores and searches all get their numbers
from `values`.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from hypjax.geometry.spaces import Space

Numbers = Mapping[str, float | Sequence[float]]  # By the name of their field.
LearnedParameters = Mapping[str, Float[Array, "..."]]  # {"log_c": ...}
CURVATURES = ("c", "curvatures")  # Fields whose bounds and rate are `c_bounds` and `c_rate`.


def has_curvature(space: type[Space]) -> bool:
    """Whether the instances of a space have a curvature c."""
    return "c" in {field.name for field in dataclasses.fields(space)}


def learned_numbers(fields: Mapping[str, Any]) -> Numbers:
    """Numbers above 0 of `config.objective` that are learned, as they are before training."""
    curvature = "curvatures" if fields["curvatures"] else "c"
    names = (*((curvature,) if fields["learn_c"] else ()), *fields["learn"])
    return {name: fields[name] for name in names}


def bounds(fields: Mapping[str, Any]) -> Mapping[str, tuple[float, float]]:
    """Bounds of the learned numbers: `c_bounds`, or else a tenth and ten times of the first one."""
    return {
        name: tuple(fields["c_bounds"]) if name in CURVATURES else (start / 10, start * 10)
        for name, start in learned_numbers(fields).items()
    }


def first_parameters(numbers: Numbers) -> dict[str, Float[Array, "..."]]:
    """The parameters before training, from numbers above 0; several of one name are a vector."""
    return {f"log_{name}": jnp.float32(np.log(start)) for name, start in numbers.items()}


def values(params: LearnedParameters) -> dict[str, Any]:
    """The learned numbers by name: floats, and of a vector a tuple of them.

    A float is the shortest decimal number that rounds to the float32 value. Of traced parameters,
    the values are traced. Either is a leaf of a space, so that a program which takes the space as
    an argument is compiled once for all its values.
    """
    return {name.removeprefix("log_"): _value(log) for name, log in params.items()}


def learned_values(fields: Mapping[str, Any], params: PyTree) -> dict[str, Any]:
    """`values` of a model's parameters; nothing if `config.objective` learns no numbers.

    A model that lacks what is learned is a `KeyError`: the first values would be wrong ones.
    """
    return values(params["scalars"]) if learned_numbers(fields) else {}


def named_values(params: LearnedParameters) -> dict[str, Any]:
    """`values` for reports: numbers of a vector have names of their own, as "curvatures_0"."""
    return {
        f"{name}_{i}" if several else name: each
        for name, value in values(params).items()
        for several in [np.ndim(value) > 0]
        for i, each in enumerate(value if several else [value])
    }


def _value(log: Float[Array, "..."]) -> Any:
    if isinstance(log, jax.core.Tracer):
        return jnp.exp(log)
    found = np.float32(np.exp(np.asarray(log, np.float64)))
    return tuple(float(str(each)) for each in found) if np.ndim(found) else float(str(found))


def projected(
    params: LearnedParameters, bounds: Mapping[str, tuple[float, float]]
) -> LearnedParameters:
    """Moves numbers outside their bounds to the nearer one.

    It is applied to the parameters, after an update. A loss that clipped c itself would have no
    gradient outside the bounds, where c would then remain.
    """
    within = {f"log_{name}": tuple(np.log(both)) for name, both in bounds.items()}
    return {name: jnp.clip(log, *within[name]) for name, log in params.items()}
