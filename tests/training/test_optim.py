"""Groups of parameters, and the learning rate."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.traverse_util import flatten_dict

from hypjax.config.choices import GROUPS, OPTIMIZERS
from hypjax.geometry import PoincareBall
from hypjax.objectives import Group
from hypjax.training import optim
from hypjax.training.riemannian import riemannian_adam


def test_split_and_merge_are_inverse():
    encoder = {"patch_embed": {"kernel": 1.0}, "norm": {"scale": 2.0}}
    params = {"model": {"encoder": encoder, "head": {"bias": 3.0}}, "objective": {}}
    for frozen in ([], ["patch_projection"], ["encoder", "head"], list(GROUPS)):
        trained, held = optim.split_frozen(params, frozen)
        assert optim.merge(trained, held) == params
    trained, held = optim.split_frozen(params, ["patch_projection"])
    assert held == {"model": {"encoder": {"patch_embed": {"kernel": 1.0}}}}
    assert "patch_embed" not in trained["model"]["encoder"]
    _, held = optim.split_frozen(params, ["model/*/n[no]rm", "model/he*/bias"])
    assert held["model"] == {"encoder": {"norm": {"scale": 2.0}}, "head": {"bias": 3.0}}


def test_the_longest_path_or_pattern_decides_how_a_parameter_is_trained(load_glyphs):
    """Adam's first steps on a constant gradient of 1 move everything by the learning rate."""
    own = "optim.groups=('objective', 3, 0, 1), ('model/*/b[12]', 5, None, 0)"
    config = load_glyphs(own, "optim.weight_decay=0.1", "optim.clip_norm=None")
    groups = (Group(("proxies",), rate=50.0, start=2), Group(("proxies", "fixed"), weight_decay=0))
    optimizer = optim.configured_optimizer(config.optim, lambda step: 1e-3, groups)
    names = {"scale": 1.0, "proxies": {"free": 1.0, "fixed": 1.0}}
    params = {"objective": jax.tree.map(jnp.float32, names), "model": {}}
    params["model"]["head"] = jax.tree.map(jnp.float32, {"b1": 1.0, "b2": {"x": 1.0}, "b3": 1.0})
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    for step in range(4):
        updates, state = update(jax.tree.map(np.ones_like, params), state, params)
        proxies = {"free": 50 * 1.1 * (step >= 2), "fixed": 1}
        head = {"b1": 5.5, "b2": {"x": 5.5}, "b3": 1.1}
        objective = {"scale": 3 * (step >= 1), "proxies": proxies}
        expected = {"objective": objective, "model": {"head": head}}
        actual = flatten_dict(updates)
        for path, value in flatten_dict(expected).items():
            np.testing.assert_allclose(actual[path], -1e-3 * value, rtol=1e-4)


def test_points_are_moved_by_riemannian_adam_and_others_as_without_them(load_glyphs):
    config = load_glyphs("optim.weight_decay=0.1", "optim.clip_norm=0.5").optim
    rng = np.random.default_rng(0)
    points = jax.jit(PoincareBall(0.3, 2.3).embed)(rng.normal(size=(5, 3)))
    params = {"model": {"w": jnp.float32([1.0, 2.0])}, "objective": {"proxies": points}}
    group = Group(("proxies",), rate=20.0, ball_c=0.3)
    actual, expected = params, params
    optimizer = optim.configured_optimizer(config, lambda step: 1e-2, (group,))
    others = optim.configured_optimizer(config, lambda step: 1e-2)
    mover = riemannian_adam(0.2, c=0.3)
    state = optimizer.init(params)
    states = others.init(params), mover.init(points)
    update, update_others, move = (jax.jit(x.update) for x in (optimizer, others, mover))
    for _ in range(3):
        gradient = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), params)
        updates, state = update(gradient, state, actual)
        actual = optax.apply_updates(actual, updates)
        # Points have no share in the norm that is clipped.
        proxies, of_proxies = expected["objective"]["proxies"], gradient["objective"]["proxies"]
        alone = {**gradient, "objective": {"proxies": np.zeros_like(of_proxies)}}
        of_others, first = update_others(alone, states[0], expected)
        moved, second = move(of_proxies, states[1], proxies)
        states = first, second
        expected = optax.apply_updates(expected, {**of_others, "objective": {"proxies": moved}})
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5), actual, expected)
    PoincareBall(0.3).check(actual["objective"]["proxies"])
    frozen = {"model": params["model"]}
    updates, _ = optimizer.update(frozen, optimizer.init(frozen), frozen)
    assert jax.tree.structure(updates) == jax.tree.structure(frozen)


def test_gradients_are_scaled_then_clipped_by_value_then_by_norm(load_glyphs):
    """A first step of SGD moves by the gradient that it gets; objectives' are not scaled."""
    fields = ("optim.gradient_factor=0.5", "optim.clip_value=10", "optim.clip_norm=10")
    config = load_glyphs("optim.name=sgd", "optim.weight_decay=0", *fields).optim
    optimizer = optim.configured_optimizer(config, lambda step: 1.0)
    gradient = {"model": {"head": {"x": jnp.float32([40, 1])}}, "objective": {"x": jnp.float32(4)}}
    moved, _ = optimizer.update(gradient, optimizer.init(gradient), gradient)
    expected = np.array([10, 0.5, 4]) * 10 / np.linalg.norm([10, 0.5, 4])
    actual = [*moved["model"]["head"]["x"], moved["objective"]["x"]]
    np.testing.assert_allclose(actual, -expected, rtol=1e-6)


def test_a_group_of_the_users_decides_how_learned_numbers_are_trained(load_glyphs):
    learned = Group(("log_c",), rate=20.0, weight_decay=0.0)
    params = {"model": {"scalars": {"log_c": jnp.float32(-2.0)}}}
    for groups, factor in (("()", 20), ("('space', 3, 0, 0)", 3)):
        config = load_glyphs(f"optim.groups={groups}", "optim.clip_norm=None").optim
        optimizer = optim.configured_optimizer(config, lambda step: 1e-3, (), (learned,))
        ones = jax.tree.map(jnp.ones_like, params)
        updates, _ = optimizer.update(ones, optimizer.init(params), params)
        actual = updates["model"]["scalars"]["log_c"]
        np.testing.assert_allclose(actual, -1e-3 * factor, rtol=1e-4)


@pytest.mark.parametrize(
    ("fields", "rate"),
    [
        ("optim.schedule=cosine", lambda step: (1 + np.cos(np.pi * step / 20)) / 2),
        ("optim.schedule=exponential optim.decay_every=4", lambda step: 0.5 ** (step / 4)),
        ("optim.schedule=step optim.decay_every=4", lambda step: 0.5 ** (step // 4)),
    ],
)
def test_rates_rise_from_0_and_then_follow_their_schedule(load_glyphs, fields, rate):
    fields = (
        *fields.split(),
        "optim.decay_factor=0.5",
        "optim.warmup_steps=10",
        "train.total_steps=30",
    )
    schedule = optim.learning_rate(load_glyphs(*fields, "optim.learning_rate=2").optim, 30)
    expected = [2 * (step / 10 if step < 10 else rate(step - 10)) for step in range(30)]
    np.testing.assert_allclose(jax.vmap(schedule)(jnp.arange(30)), expected, rtol=1e-5)


REFERENCES = {
    "adamw": lambda rate, decay: optax.adamw(rate, weight_decay=decay),
    "adam": lambda rate, decay: optax.chain(optax.add_decayed_weights(decay), optax.adam(rate)),
    "sgd": lambda rate, decay: optax.chain(
        optax.add_decayed_weights(decay), optax.sgd(rate, momentum=0.95)
    ),
    "muon": lambda rate, decay: optax.contrib.muon(
        rate, weight_decay=decay, adam_weight_decay=decay, consistent_rms=0.2
    ),
}


def _trajectory(optimizer, params, gradients):
    @jax.jit
    def step(params, state, gradient):
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    state = optimizer.init(params)
    for gradient in gradients:
        params, state = step(params, state, gradient)
    return params


@pytest.mark.parametrize(
    ("name", "head_warmup_steps"), [*((name, 0) for name in OPTIMIZERS), ("muon", 2)]
)
def test_each_optimiser_takes_the_steps_of_optax_at_the_groups_rates(
    load_glyphs, name, head_warmup_steps
):
    own = "optim.groups=('head', 3, None, 0), ('objective', 5, 0, 0)"
    config = load_glyphs(
        own, f"optim.name={name}", "optim.weight_decay=0.1", "optim.clip_norm=None"
    )
    rng = np.random.default_rng(0)
    shapes = {"encoder": {"kernel": (4, 6), "bias": (6,), "tokens": (1, 2, 6)}}
    shapes = {"model": {**shapes, "head": {"kernel": (6, 3)}}, "objective": {"proxies": (5, 3)}}

    def draw():
        is_shape = lambda x: isinstance(x, tuple)  # noqa: E731
        return jax.tree.map(lambda s: np.float32(rng.normal(size=s)), shapes, is_leaf=is_shape)

    params, gradients = draw(), [draw() for _ in range(5)]
    optimizer = optim.configured_optimizer(
        config.optim, lambda step: 1e-2, head_warmup_steps=head_warmup_steps
    )
    actual = flatten_dict(_trajectory(optimizer, params, gradients))
    settings = {"encoder": (1, 0.1), "head": (3, 0.1), "proxies": (5, 0.0)}
    alike = collections.defaultdict(list)  # The paths of parameters that are moved alike.
    for path, start in flatten_dict(params).items():
        # Muon moves the matrices of the model alone: proxies are no map.
        is_map = start.ndim == 2 and path[0] == "model"
        kind = "adamw" if name == "muon" and not is_map else name
        alike[kind, *settings[path[1]], head_warmup_steps * (path[1] == "encoder")].append(path)
    for (kind, factor, decay, skipped), paths in alike.items():
        reference = REFERENCES[kind](factor * 1e-2, decay)
        start, *alone = (
            {path: flatten_dict(x)[path] for path in paths} for x in [params, *gradients]
        )
        expected = _trajectory(reference, start, alone[skipped:])
        for path in paths:
            np.testing.assert_allclose(actual[path], expected[path], rtol=1e-5, atol=1e-6)
