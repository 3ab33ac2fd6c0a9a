"""Spaces, configurations and batches that tests of losses share."""

import jax
import jax.numpy as jnp
import pytest

from hypjax.config import default_config
from hypjax.config.settings import loss_settings
from hypjax.geometry import PoincareBall, Sphere
from hypjax.objectives import create_objective, loss_function
from hypjax.types import Batch, Outputs

SPHERE, BALL = Sphere(), PoincareBall(0.1, 2.3)
both_spaces = pytest.mark.parametrize("space", [SPHERE, BALL], ids=["sphere", "poincare"])
mostly_sphere = pytest.mark.parametrize(
    "space", [SPHERE, pytest.param(BALL, marks=pytest.mark.slow)], ids=["sphere", "poincare"]
)


def configured(name, **fields):
    """The default configuration of a loss, with some fields of its own."""
    config = default_config(name)
    config.objective.update(fields)
    return config


def objective_of(config):
    """The objective of a configuration."""
    return create_objective(loss_settings(config))


def objective(name, **fields):
    """The objective of the default configuration of a loss, with some fields of its own."""
    return objective_of(configured(name, **fields))


@jax.jit
def embedded(space, features):
    """The points of features, and the distances of all pairs by subtraction."""
    points = space.embed(features)
    return points, space.distance(points[:, None], points)


def _array(x):
    return None if x is None else jnp.asarray(x)


def loss_of(objective, started, features, labels=None, *, ids=None, key=None, teacher=None):
    """(loss, (state, metrics)) of a batch, for the result of `objective.init`."""
    batch = Batch(None, None if labels is None else jnp.asarray(labels), ids, None)
    outputs, taught = (x if x is None else Outputs(x, x) for x in map(_array, (features, teacher)))
    return loss_function(objective)(*started, outputs, taught, batch, key)
