"""What docs/extending.md shows does what the page says."""

import itertools
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hypjax
from hypjax.config import default_config
from hypjax.config.rules import validate
from hypjax.errors import UserError
from hypjax.geometry import SPACES, PoincareBall, Product, Sphere
from hypjax.objectives import pair_losses
from hypjax.retrieval import metrics, nearest_neighbors, query_scores
from hypjax.system import integrations
from tests.helpers import shown_objective
from tests.helpers.losses import objective_of


def shown(section):
    """The module whose code a section of the page shows, and the section's further programs."""
    code, *rows = shown_objective.blocks(section)
    module = types.ModuleType("shown")
    exec(compile(code, f"docs/extending.md:{section}", "exec"), vars(module))
    return module, *rows


@pytest.mark.slow
def test_the_test_of_the_objective_passes(monkeypatch):
    shown_objective.install(monkeypatch)
    _, _, test = shown_objective.blocks()
    names = {}
    exec(test, names)
    names["test_equals_a_plain_loop"]()


@pytest.mark.parametrize("section", ["An analysis", "An engine", "An encoder of another library"])
def test_the_code_of_a_section_is_a_module(section, monkeypatch):
    monkeypatch.setitem(sys.modules, "shown", types.ModuleType("shown"))
    module, line = shown(section)
    assert module.__doc__ and len(eval("{" + line + "}", vars(integrations))) == 1


def test_the_loss_of_pairs_equals_a_plain_loop():
    module, line = shown("A loss of pairs")
    scope = {**vars(pair_losses), "squares": module}
    loss = eval("{" + line + "}", scope)["squares"].function
    points = np.asarray(Sphere().embed(np.random.default_rng(0).normal(size=(5, 3))))
    labels, expected = [0, 1, 0, 1, 2], 0.0
    for i, j in itertools.permutations(range(5), 2):
        distance = 2 - 2 * points[i] @ points[j]
        expected += distance**2 if labels[i] == labels[j] else max(1 - distance, 0) ** 2
    np.testing.assert_allclose(loss(points, labels), expected / 5, rtol=1e-5)


@pytest.mark.slow
def test_the_space_is_trained_scored_and_searched_in(monkeypatch, float64):
    (module,) = shown("A space")
    monkeypatch.setitem(SPACES, "klein", None)  # It is removed afterwards.
    hypjax.register_space("klein", module.Klein)
    config = default_config()
    config.objective.space, config.objective.learn_c = "klein", True
    validate(config)
    space = objective_of(config).with_scalars({"c": 0.3}).space
    ball = PoincareBall(0.3, 2.3)
    features = np.random.default_rng(0).normal(size=(20, 5))
    x, expected = (np.asarray(jax.jit(s.embed)(features)) for s in (space, ball))
    space.check(x)
    np.testing.assert_allclose(jax.jit(space.to_ball)(x), expected, rtol=1e-12)
    np.testing.assert_allclose(jax.jit(space.from_ball)(expected), x, rtol=1e-12)
    again = jax.jit(lambda x: space.embed(space.features(x)))(x)
    np.testing.assert_allclose(again, x, rtol=1e-12)
    apart = np.asarray(jax.jit(ball.distance_matrix)(expected, expected))
    np.testing.assert_allclose(jax.jit(space.distance)(x[:, None], x), apart, rtol=1e-9, atol=1e-9)
    with jax.enable_x64(False):
        neighbours = nearest_neighbors(np.float32(x), np.float32(x), k=4, space=space)[1]
    np.testing.assert_array_equal(neighbours, np.argsort(apart, axis=1)[:, :4])
    assert space.mean(x) == pytest.approx(space.from_ball(PoincareBall(0.3).mean(expected)))
    with pytest.raises(UserError, match="embedding 1 is not inside the ball"):
        space.check(np.array([[0.1, 0], [2, 0]]))


def test_a_subclass_of_the_product_is_a_space_with_parts(monkeypatch):
    class Largest(Product):
        def combine(self, distances):
            return jnp.maximum(*distances)

    monkeypatch.setitem(SPACES, "largest", None)  # It is removed afterwards.
    hypjax.register_space("largest", Largest)
    config = default_config()
    config.objective.space, config.objective.parts = "largest", ("poincare", "sphere")
    space = objective_of(config).space
    x = jax.jit(space.embed)(np.random.default_rng(0).normal(size=(20, 6)))
    parts = zip((part for part, _ in space.parts), space.split(x), strict=True)
    distances = np.maximum(*(jax.jit(part.distance_matrix)(y, y) for part, y in parts))
    neighbours = nearest_neighbors(x, x, k=4, space=space)[1]
    np.testing.assert_array_equal(neighbours[:, 1:], np.argsort(distances, axis=1)[:, 1:4])


def test_the_metrics_tell_the_first_places(monkeypatch):
    module, line = shown("A metric")
    names = eval("{" + line.partition("...")[2], {"first_match": module})
    for name, metric in names.items():
        monkeypatch.setitem(metrics.WITHOUT_K, name, metric)
    angles = np.array([0.0, 0.1, 0.2, 0.7, 1.5, 1.6])
    points = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    scores = query_scores(points, [0, 0, 0, 1, 1, 1], metrics=names, space=Sphere())
    assert scores["first_match"].tolist() == [1, 1, 1, 4, 1, 1]
    assert scores["both_match"].tolist() == [1, 1, 1, 0, 1, 1]
