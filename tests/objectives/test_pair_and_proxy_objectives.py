"""Objectives of the losses of pairs and of proxies: parameters, groups, fields and metrics."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hypjax import objectives
from hypjax.config import choose_objective, default_config, validate
from hypjax.errors import UserError
from hypjax.geometry import PoincareBall
from hypjax.objectives import Group, Objective, Spec, create_objective
from hypjax.objectives.pair_losses import PAIR_LOSSES
from hypjax.objectives.proxy_losses import PROXY_LOSSES
from hypjax.types import Batch, Outputs

# Losses of the labels of a batch; that of tuples, whose order matters, has tests of its own.
NAMES = [*(name for name, loss in PAIR_LOSSES.items() if not loss.by_tuple), *PROXY_LOSSES]
LABELS = np.repeat(np.arange(6), 2)


def configured(name, **fields):
    config = default_config()
    choose_objective(config, name)
    config.objective.clip_radius = 1.5
    config.objective.update(fields)
    return config


def call(config, features):
    objective = create_objective(config)
    params, state = objective.init(jax.random.key(0), Spec(8, 2, 16, features.shape[1], 100, 12))
    batch = Batch(None, jnp.asarray(LABELS), None, None)
    arguments = params, state, Outputs(None, features), None, batch, None
    return params, *jax.jit(objective.loss)(*arguments)


@pytest.fixture
def features():
    return np.random.default_rng(0).normal(size=(12, 5)).astype(np.float32)


@pytest.mark.parametrize("name", ["supcon", "proxy_anchor"])
def test_metrics_are_those_of_the_batch(name, features):
    _, loss, (state, told) = call(configured(name), features)
    ball = PoincareBall(0.1, 1.5)
    points = np.asarray(ball.embed(features))
    distances = np.asarray(ball.distance(points[:, None], points)) + np.diag([np.inf] * 12)
    recall = np.mean(LABELS[np.argmin(distances, axis=1)] == LABELS)
    norms = np.linalg.norm(features, axis=1)
    wanted = {
        "feature_norm": norms.mean(),
        "embedding_norm": np.linalg.norm(points, axis=1).mean(),
        "clipped_share": np.mean(norms > 1.5),
        "batch_recall@1": recall,
    }
    assert np.isfinite(loss) and state == {}
    assert told.keys() == wanted.keys() and 0 < recall < 1 and 0 < wanted["clipped_share"] < 1
    for metric, value in wanted.items():
        np.testing.assert_allclose(told[metric], value, rtol=1e-5, err_msg=metric)


def test_fields_reach_the_loss(features):
    ball, fields = PoincareBall(0.1, 1.5), {"gamma": 0.3, "regularization": 0.5}
    objective = create_objective(configured("soft_triple", centres=3, **fields))
    params, _ = objective.init(jax.random.key(0), Spec(8, 2, 16, 5, 100, 12))

    @jax.jit
    def losses(params, features):
        batch = Batch(None, jnp.asarray(LABELS), None, None)
        found, _ = objective.loss(params, {}, Outputs(None, features), None, batch, None)
        points, proxies = ball.embed(features), ball.embed(params["proxies"])
        return found, objectives.soft_triple(points, LABELS, proxies, space=ball, **fields)

    found, expected = losses(params, features)
    assert found == expected
    for name in NAMES:
        config = configured(name)
        settings = create_objective(config).function.keywords
        assert settings.items() <= dict(config.objective).items() and settings


def test_proxies_are_drawn_as_published_and_have_a_rate_of_their_own():
    for name, shape in (("proxy_anchor", (500, 64)), ("soft_triple", (500, 4, 64))):
        fields = {"centres": 4} if name == "soft_triple" else {}
        objective = create_objective(configured(name, proxy_rate=50.0, **fields))
        params, state = objective.init(jax.random.key(0), Spec(500, 2, 16, 64, 1000, 12))
        assert params["proxies"].shape == shape and state == {}
        count = np.prod(shape[:-1])
        np.testing.assert_allclose(np.std(params["proxies"]), (2 / count) ** 0.5, rtol=0.02)
        assert objective.groups == (Group(("proxies",), rate=50.0),)
        assert isinstance(objective, Objective)


@pytest.mark.parametrize("name", NAMES)
def test_batches_of_any_classes_are_for_losses_that_need_no_pairs(name, features):
    config = configured(name)
    validate(config)
    # Of tuples, too, no loss may take the order for classes.
    for sampling in ("tuples", "shuffled"):
        config.train.sampling = sampling
        assert create_objective(config).samples_per_class is None
    if name in PROXY_LOSSES or name == "contrastive":
        validate(config)
        _, _, (_, told) = call(config, features)
        assert "batch_recall@1" not in told
    else:
        with pytest.raises(UserError, match="this objective compares images of one class"):
            validate(config)
