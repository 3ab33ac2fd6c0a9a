"""What a train step changes, and what it compiles to."""

import re
from types import SimpleNamespace
from unittest.mock import NonCallableMock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from hypjax.assemble import assemble_training
from hypjax.config import load_config
from hypjax.experiment.embedding import embed_function
from hypjax.geometry import Sphere
from hypjax.objectives import loss_function
from hypjax.settings import Step
from hypjax.training.learner import Learner
from hypjax.training.step import TrainState, _apply_gradient, make_train_step
from tests.helpers import small_runs, steps
from tests.helpers.steps import learner_of, leaves, lower, random_batch, start


def global_norm(arrays):
    return np.sqrt(sum(np.sum(array**2) for array in arrays.values()))


CLIP, DECAY, RATE, EPS = 0.01, 0.3, 0.01, 1e-4


@pytest.fixture(scope="module")
def begun(data_dir):
    """A configuration, its first state and its step."""
    fields = [*small_runs.SHORT_GLYPHS, f"run.data_dir={data_dir}", "optim.schedule=constant"]
    fields += ["optim.warmup_steps=0", "optim.frozen=patch_projection", f"optim.eps={EPS}"]
    fields += [f"optim.clip_norm={CLIP}", f"optim.weight_decay={DECAY}"]
    config = load_config("glyphs", [*fields, f"optim.learning_rate={RATE}"])
    return config, *start(config)


def test_an_update_is_adamw_on_the_clipped_gradient_of_the_trained_parameters(begun):
    """One step beside AdamW written out: clip by the global norm, decay everything, decoupled."""
    config, state, step = begun
    state, learner, batch = steps.copied(state), learner_of(config), random_batch()

    def loss_of(params):
        images = (batch.inputs["images"] / 255 - config.data.mean[0]) / config.data.std[0]
        outputs = learner.model.apply({"params": params["model"]}, images)
        objective_loss = loss_function(learner.objective)
        return objective_loss({}, {}, outputs, None, batch, jax.random.key(0))[0]

    gradient = leaves(jax.jit(jax.grad(loss_of))(state.params)["model"])
    before = leaves(jax.device_get(state.params["model"]))
    everything = global_norm(gradient)
    gradient = {name: g for name, g in gradient.items() if "patch_embed" not in name}
    norm = global_norm(gradient)
    assert everything > 1.002 * norm > 100 * CLIP
    state, metrics = step(state, batch)
    np.testing.assert_allclose(metrics["gradient_norm"], norm, rtol=1e-4)
    after = leaves(state.params["model"])
    moments = leaves(optax.tree.get(state.opt_state, "mu")["model"])
    assert moments.keys() == gradient.keys()
    for name, g in gradient.items():
        clipped = g * CLIP / norm
        np.testing.assert_allclose(moments[name], 0.1 * clipped, rtol=1e-3, atol=1e-8)
        moved = RATE * (clipped / (np.abs(clipped) + EPS) + DECAY * before[name])
        np.testing.assert_allclose(after[name], before[name] - moved, rtol=1e-4, atol=1e-5)


def test_the_step_compiles_once_and_reuses_its_state(begun):
    _, state, step = begun
    state = steps.copied(state)
    kernel, batch = state.params["model"]["head"]["kernel"], random_batch()
    state, _ = step(state, batch)
    assert kernel.is_deleted()
    with jax.transfer_guard_host_to_device("disallow"):
        for _ in range(3):
            state, _ = step(state, batch)
    assert step._cache_size() == 1


@pytest.mark.parametrize(("precision", "variant"), [("float32", "sph"), ("bfloat16", "hyp")])
def test_no_float32_product_is_rounded(load_glyphs, variant, precision):
    config = load_glyphs(f"model.precision={precision}", variant=variant)
    learner, state = steps.first_shapes(config)
    spaces = {"head": learner.objective.score_space, "encoder": Sphere()}
    embed = embed_function(learner.model, learner.pixels, spaces, (1.0, 0.5))
    for program in (
        lower(make_train_step(learner), state, random_batch()),
        lower(embed, state.params["model"], random_batch().inputs["images"]),
    ):
        products = steps.float32_products(program)
        assert products
        for product in products:
            assert isinstance(product, re.Match), product
            assert product.groups() == ("HIGHEST", "HIGHEST"), product.string


@pytest.mark.parametrize(("loss", "slope"), [(1.0, 3.0), (1.0, np.nan), (np.inf, 3.0)])
def test_an_update_is_dropped_if_the_loss_or_the_gradient_is_not_finite(loss, slope):
    """One with a finite loss, too. Only a memory goes on. A learned c keeps its bounds."""
    optimizer, model = optax.sgd(0.5), {"w": jnp.float32(1), "scalars": {"log_c": jnp.float32(0)}}
    params = {"model": model, "objective": {}}
    objective = SimpleNamespace(lasting_state=("memory",), teacher_decay=0.9, groups=())
    learner = NonCallableMock(
        Learner,
        frozen=(),
        optimizer=optimizer,
        objective=objective,
        step=Step(seed=0, skips_nonfinite=True),
        scalar_bounds={"c": (0.5, 2.0)},
        schedule=lambda updates: 0.1 * updates,
    )
    old, new = ({"memory": jnp.int32(i), "other": jnp.int32(i)} for i in (0, 1))
    teacher = {"w": jnp.float32(4), "scalars": {"log_c": jnp.float32(0)}}
    state = TrainState(jnp.int32(7), params, optimizer.init(params), old, jnp.int32(2), teacher)
    gradient = jax.tree.map(lambda x: jnp.full_like(x, slope), params)
    after, metrics = _apply_gradient(learner, state, gradient, jnp.float32(loss), (new, {}))
    finite = np.isfinite(loss * slope)
    assert metrics["finite"] == finite and after.params["model"]["w"] == (-0.5 if finite else 1)
    c = after.params["model"]["scalars"]["log_c"]
    np.testing.assert_allclose(c, np.log(0.5) if finite else 0, rtol=1e-6)
    assert after.objective_state == {"memory": 1, "other": finite}
    np.testing.assert_allclose(after.teacher["w"], 0.9 * 4 - 0.1 * 0.5 if finite else 4, rtol=1e-6)
    assert after.step == 8 and after.skipped == metrics["skipped"] == 2 + (not finite)
    np.testing.assert_allclose(metrics["learning_rate"], 0.5, rtol=1e-6)


def test_without_labels_two_views_of_an_image_are_a_class(load_glyphs):
    """Changes of colour do not depend on how many images are embedded at once."""
    fields = "train.unlabelled=True", "data.colour_jitter=(0.4,0.4,0.0,0.0)", "data.blur=0.5"
    run = assemble_training(load_glyphs(*fields))
    plan, images = run.plans(0), len(run.images)
    assert run.sizes.classes == run.sizes.training_images == images > run.images.num_classes
    np.testing.assert_array_equal(plan.labels, plan.ids)
    np.testing.assert_array_equal(plan.ids[::2], plan.ids[1::2])
    assert np.any(plan.boxes[::2] != plan.boxes[1::2])
    losses = {}
    for changes in (fields, fields[:1]):
        for size in (0, 8):
            state, step = start(load_glyphs(*changes, f"run.microbatch={size}"))
            losses[changes, size] = float(step(state, random_batch())[1]["loss"])
        np.testing.assert_allclose(losses[changes, 0], losses[changes, 8], rtol=1e-5)
    assert abs(losses[fields, 0] - losses[fields[:1], 0]) > 1e-3


@pytest.mark.parametrize("variant", ["hyp", "irt-r"])
def test_the_spread_of_the_images_gradients_is_measured(load_glyphs, variant):
    """The nuclear norm of their covariance, by its singular values.

    On the sphere gradients are those by descriptors of length 1, so lengths of features, which
    leave the loss as it is, do not change it.
    """
    config = load_glyphs(
        "run.gradient_covariance=True", "objective.clip_radius=None", variant=variant
    )
    learner, (state, step), batch = learner_of(config), start(config), random_batch()
    images = (batch.inputs["images"] / 255 - config.data.mean[0]) / config.data.std[0]
    outputs = learner.model.apply({"params": state.params["model"]}, images)
    loss = loss_function(learner.objective)
    variables = state.params["objective"], state.objective_state
    slopes = jax.grad(lambda x: loss(*variables, x, None, batch, None)[0])(outputs).projected
    if variant == "irt-r":  # The chain rule: descriptors are features divided by their lengths.
        slopes *= np.linalg.norm(outputs.projected, axis=1, keepdims=True)
    expected = np.linalg.norm(np.cov(24 * slopes, rowvar=False, bias=True), "nuc")
    longer = steps.copied(state)
    model = longer.params["model"]
    scaled = {**model, "head": jax.tree.map(lambda x: 10 * x, model["head"])}
    longer = longer._replace(params={**longer.params, "model": scaled})
    of_state, of_longer = (step(x, batch)[1] for x in (state, longer))
    np.testing.assert_allclose(of_state["gradient_covariance"], expected, rtol=1e-3)
    is_same = np.isclose(of_longer["gradient_covariance"], expected, rtol=1e-3)
    assert is_same == np.isclose(of_longer["loss"], of_state["loss"]) == (variant == "irt-r")


def test_the_exponent_of_gem_learns_ten_times_as_fast_and_does_not_decay(load_glyphs):
    """Adam's first update is its rate, whatever the gradient."""
    gem = "model.pooling=gem", "model.eval_pooling=gem", "model.learn_gem=True"
    fields = "optim.learning_rate=1e-3", "optim.weight_decay=0.3", "optim.eps=1e-12"
    fields += "optim.warmup_steps=0", "optim.schedule=constant"
    # The rate of a user's group of the encoder holds for the exponent, too.
    for groups, expected in (("()", 0.01), ("(('encoder', 0.1, None, 0),)", 0.001)):
        state, step = start(load_glyphs(*gem, *fields, f"optim.groups={groups}"))
        state, _ = step(state, random_batch())
        exponent = float(state.params["model"]["encoder"]["gem_exponent"])
        np.testing.assert_allclose(abs(exponent - 3), expected, rtol=1e-3)
