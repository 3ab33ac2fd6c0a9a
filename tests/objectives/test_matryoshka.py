"""A loss of prefixes is the sum of that loss over the prefixes, each embedded by itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hypjax import objectives
from hypjax.config import validate
from hypjax.errors import UserError
from hypjax.objectives import Group, Matryoshka, ProblemSizes
from tests.helpers import losses
from tests.helpers.losses import BALL, SPHERE, objective_of

DIM, DIMS, CLASSES = 12, (3, 5), 4
LABELS = np.repeat(np.arange(CLASSES), 2)
SPEC = ProblemSizes(CLASSES, 2, 7, DIM, 100, len(LABELS))


def configured(name, space, **fields):
    config = losses.configured(f"matryoshka+{name}", space=space, dims=DIMS, **fields)
    config.model.head_dim, config.train.samples_per_class = DIM, 2
    return config


def by_hand(name, x, space, proxies):
    points, others = space.embed(x), space.embed(proxies)
    return {
        "pairwise_cross_entropy": lambda: objectives.pairwise_cross_entropy(
            points, space=space, temperature=0.2, labels=LABELS
        ),
        "supcon": lambda: objectives.supcon(points, LABELS, space=space),
        "proxy_anchor": lambda: objectives.proxy_anchor(points, LABELS, others, space=space),
    }[name]()


@pytest.mark.parametrize(
    ("name", "space"),
    [("pairwise_cross_entropy", "poincare"), ("supcon", "sphere"), ("proxy_anchor", "sphere")],
)
def test_is_the_sum_of_the_losses_of_slices(name, space):
    config = configured(name, space)
    validate(config)
    objective = objective_of(config)
    params, state = objective.init(jax.random.key(0), SPEC)
    assert not jax.tree.leaves(state)
    # Some features, and prefixes of some of these, are beyond the clip radius.
    x = np.random.default_rng(0).normal(size=(len(LABELS), DIM)).astype("f")

    @jax.jit
    def both(x, params):
        proxies = params["base"].get("proxies", x)
        parts = [by_hand(name, x[:, :m], objective.space, proxies[:, :m]) for m in (*DIMS, DIM)]
        norm = jnp.mean(jnp.linalg.norm(objective.space.embed(x), axis=1))
        return losses.loss_of(objective, (params, state), x, LABELS), parts, norm

    (loss, (_, metrics)), parts, norm = both(x, params)
    np.testing.assert_allclose(loss, sum(parts), rtol=1e-5)
    for dim, part in zip(DIMS, parts, strict=False):
        np.testing.assert_allclose(metrics[f"loss@{dim}"], part, rtol=1e-5)
    assert objective.score_space == (SPHERE if space == "sphere" else BALL)
    if name == "proxy_anchor":
        assert objective.groups == (Group(("base", "proxies"), rate=100.0),)
    if name == "pairwise_cross_entropy":  # Of points that coincide.
        np.testing.assert_allclose(metrics["chance_loss"], 3 * 2 * np.log(2 * CLASSES - 1))
    np.testing.assert_allclose(metrics["embedding_norm"], norm, rtol=1e-5)


def test_wrong_fields_are_refused():
    for field, value in (("objective.dims", (5, 3)), ("eval.prefixes", (0, 3))):
        config = configured("supcon", "sphere")
        config.update_from_flattened_dict({field: value})
        with pytest.raises(UserError, match=f"config.{field} is .*; it must be "):
            validate(config)
    base = objectives.PairObjective(SPHERE, objectives.supcon, None)
    with pytest.raises(UserError, match="has 12; it must be below the head's 12"):
        Matryoshka(base, (3, 12)).init(jax.random.key(0), SPEC)
