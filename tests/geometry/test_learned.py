"""Spaces whose curvature is a parameter."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from hypjax.config import default_config
from hypjax.geometry import PoincareBall, Sphere, learned
from hypjax.geometry.learned import bounds, scalar_parameters, scalar_values, within_bounds

BALL = PoincareBall(0.1, 2.3)


def parameters(c):
    return {"log_c": jnp.float32(math.log(c))}


@pytest.mark.parametrize("c", [0.01, 0.1, 1 / 3, 10.0])
def test_a_space_has_the_curvature_of_its_parameters(c):
    params = scalar_parameters({"c": c})
    assert params == parameters(c) and params["log_c"].dtype == jnp.float32
    found = BALL.with_scalars(scalar_values(params))
    # The logarithm of a small number is rounded to float32, too.
    assert found.c == pytest.approx(c, rel=3e-7) and found.clip_radius == 2.3
    assert type(found.c) is float and np.float32(found.c) == np.float32(scalar_values(params)["c"])
    assert BALL.with_scalars({}) is BALL and Sphere().with_scalars({"c": c}) == Sphere()
    assert [*map(learned.has_curvature, (PoincareBall, Sphere))] == [True, False]


def test_projection_moves_numbers_to_the_nearer_bound():
    fields = default_config("hypmix").objective
    fields.learn_c, fields.curvatures, fields.learn = True, (1e-5, 0.1, 99.0), ("ball_weight",)
    outside = scalar_parameters({"curvatures": fields.curvatures, "ball_weight": 50.0})
    found = scalar_values(within_bounds(outside, bounds(fields)))
    assert found["curvatures"] == pytest.approx((0.01, 0.1, 10.0))
    assert found["ball_weight"] == pytest.approx(30.0)
