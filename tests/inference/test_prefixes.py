"""Scores of prefixes of the head's output."""

import jax
import numpy as np
import pytest

from hypjax.config import default_config, validate
from hypjax.errors import UserError
from hypjax.geometry import PoincareBall, Sphere
from hypjax.inference.embedding import part_of, scored_spaces, to_points
from hypjax.models import create_embedder
from hypjax.objectives import create_objective


def placed(config):
    """Points of random encoder embeddings by name, and the head's outputs."""
    model = create_embedder(config, evaluating=True)
    pooled = 3 * jax.random.normal(jax.random.key(0), (5, 384))
    params = model.init(jax.random.key(1), pooled, method="project").get("params", {})
    spaces = scored_spaces(config, create_objective(config), params)
    outputs = model.apply({"params": params}, pooled, method="project")
    return to_points(model, params, spaces, pooled[:, None]), np.asarray(outputs.projected)


def test_prefixes_are_embedded_by_themselves_in_each_space_of_the_head():
    config = default_config("matryoshka+supcon")
    config.eval.prefixes, config.objective.dims = (3, 9), (9, 20)
    config.eval.spaces.head = ("objective", "sphere")
    validate(config)
    found, features = placed(config)
    ball = PoincareBall(0.1, 2.3)
    assert (np.linalg.norm(features[:, :9], axis=1) < np.linalg.norm(features, axis=1)).all()
    for dim in (3, 9, 20):
        for name, space in ((f"head@{dim}", ball), (f"head@{dim}:sphere", Sphere())):
            assert part_of(name) == "head"
            np.testing.assert_array_equal(found.pop(name), space.embed(features[:, :dim]))
    assert list(found) == ["head", "head:sphere", "encoder"]
    np.testing.assert_array_equal(found["head"], ball.embed(features))


def test_a_prefix_that_is_no_shorter_than_the_encoder_is_refused():
    config = default_config()
    config.model.head = "none"
    config.eval.prefixes = (384,)
    validate(config)
    with pytest.raises(UserError, match="a prefix of 384 dimensions is not shorter than the head"):
        placed(config)
