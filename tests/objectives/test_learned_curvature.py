"""Losses as functions of the curvature that is learned."""

import json

import jax
import numpy as np
import pytest

from hypjax.config import default_config
from hypjax.config.rules import validate
from hypjax.errors import UserError
from hypjax.geometry import Lorentz, PoincareBall, Product, Sphere
from hypjax.geometry.learned import (
    bounds,
    initial_scalars,
    learned_scalars,
    scalar_parameters,
    scalar_values,
    within_bounds,
)
from hypjax.geometry.registry import describe_space, space_of
from hypjax.objectives import OBJECTIVES, Objective, ProblemSizes
from tests.helpers import losses
from tests.helpers.losses import BALL, loss_of, objective_of

CLASSES, SAMPLES, DIM = 5, 3, 4
# Of HIER, whose triplets and proxies are chosen by the distances, and of Circle, whose weights are
# held constant, the gradient is no derivative. ArcFace needs the sphere. Losses of
# prefixes are sums of the others.
# Captions have two towers, see test_captions.py.
OTHERS = "circle", "arcface", "captions"
LOSSES = [name for name in OBJECTIVES if "+" not in name and name not in OTHERS]
LOSSES += ["cones+pairwise_cross_entropy", "pairwise_cross_entropy, lorentz"]
QUICK = ("pairwise_cross_entropy", "hypmix", "pairwise_cross_entropy, lorentz")
STEP = 1e-5


def configured(name):
    name, _, space = name.partition(", ")
    config = losses.configured(name, learn_c=True, **({"space": space} if space else {}))
    config.train.samples_per_class = SAMPLES
    if name == "tuple_contrastive":
        config.train.sampling, config.train.tuples.negatives = "tuples", SAMPLES - 2
    return config


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in LOSSES]
)
def test_the_gradient_by_what_is_learned_is_a_finite_difference(name, float64):
    config, rng = configured(name), np.random.default_rng(1)
    fields = OBJECTIVES[config.objective.name].fields
    config.objective.learn = tuple(each for each, field in fields.items() if field.learnable)
    labels = np.repeat(np.arange(CLASSES), SAMPLES)
    size = len(labels)
    # Classes overlap, no feature is at the clip radius, and some are beyond it.
    features = rng.normal(size=(CLASSES, DIM))[labels] + 0.7 * rng.normal(size=(size, DIM))
    spec = ProblemSizes(CLASSES, SAMPLES, DIM, DIM, 100, size, coarse_labels=((0, 0, 1, 1, 2),))
    objective = objective_of(config)
    params, state = objective.init(jax.random.key(0), spec)
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)

    @jax.jit
    @jax.value_and_grad
    def loss(learned):
        moved = objective.with_scalars(scalar_values(learned))
        ids, key = np.arange(size), jax.random.key(1)
        return loss_of(moved, (params, state), features, labels, ids=ids, key=key)[0]

    for c in (0.05, 0.8):
        start = {**initial_scalars(config.objective), "c": c}
        logs = {f"log_{number}": np.log(value) for number, value in start.items()}
        _, gradient = loss(logs)
        for number, log in logs.items():
            (below, _), (above, _) = (loss({**logs, number: log + s}) for s in (-STEP, STEP))
            expected = (above - below) / (2 * STEP)
            np.testing.assert_allclose(gradient[number], expected, rtol=1e-6, atol=1e-8)
            assert abs(gradient[number]) > 1e-6


def test_a_product_has_fields_and_learns_a_curvature_for_each_curved_part():
    config, features = configured("supcon"), np.random.default_rng(0).normal(size=(6, 12))
    config.objective.update(space="product", parts=("poincare", "sphere", "lorentz"))
    config.objective.curvatures, config.model.head_dim = (0.2, 0.5), 12
    validate(config)
    objective = objective_of(config)
    parts = PoincareBall(0.2, 2.3), Sphere(), Lorentz(0.5, 2.3)
    assert objective.space == Product(tuple((part, 1.0) for part in parts))
    assert space_of(json.loads(json.dumps(describe_space(objective.space)))) == objective.space
    assert objective.with_scalars({"curvatures": (0.3, 0.4)}).space.parts[2][0].c == 0.4

    @jax.jit
    @jax.grad
    def slopes(learned):
        moved = objective.with_scalars(scalar_values(learned))
        return loss_of(moved, ({}, {}), features, np.repeat(np.arange(3), 2))[0]

    assert all(slopes(scalar_parameters(initial_scalars(config.objective)))["log_curvatures"] != 0)
    config.objective.curvatures = (0.2,)
    with pytest.raises(UserError, match="2 numbers, one for each part with a curvature"):
        validate(config)


def test_learned_scalars_replace_those_of_the_configuration():
    config = configured("pairwise_cross_entropy")
    assert objective_of(config).space.c == config.objective.c == 0.1
    learned = learned_scalars(config.objective, {"scalars": scalar_parameters({"c": 0.5})})
    assert objective_of(config).with_scalars(learned).space.c == 0.5
    config.objective.space, config.objective.learn = "lorentz", ("feature_scale",)
    validate(config)
    scalars = scalar_values(scalar_parameters({"c": 0.5, "feature_scale": 2.0}))
    assert objective_of(config).with_scalars(scalars).space == Lorentz(0.5, 2.3, 2.0)
    with pytest.raises(KeyError):  # No caller gets the first curvature in place of a learned one.
        learned_scalars(config.objective, {})
    config.objective.learn_c, config.objective.learn = False, ()
    assert learned_scalars(config.objective, {}) == {}
    plain = type("Plain", (Objective,), {})()  # No dataclass, so it has no scalars.
    assert plain.with_scalars({"c": 1.0}) is plain


@pytest.mark.parametrize("c", [0.01, 1 / 3, 10.0])
def test_a_space_has_the_curvature_of_its_parameters(c):
    params = scalar_parameters({"c": c})
    assert params == {"log_c": np.log(np.float32(c))} and params["log_c"].dtype == np.float32
    ball = BALL.with_scalars(scalar_values(params))
    # The logarithm of a small number is rounded to float32, too.
    assert ball.c == pytest.approx(c, rel=3e-7) and ball.clip_radius == 2.3
    assert type(ball.c) is float and np.float32(ball.c) == np.float32(scalar_values(params)["c"])


def test_projection_moves_numbers_to_the_nearer_bound():
    fields = default_config("hypmix").objective
    fields.learn_c, fields.curvatures, fields.learn = True, (1e-5, 0.1, 99.0), ("ball_weight",)
    outside = scalar_parameters({"curvatures": fields.curvatures, "ball_weight": 50.0})
    actual = scalar_values(within_bounds(outside, bounds(fields)))
    assert actual["curvatures"] == pytest.approx((0.01, 0.1, 10.0))
    assert actual["ball_weight"] == pytest.approx(30.0)
