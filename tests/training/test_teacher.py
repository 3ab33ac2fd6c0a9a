"""The teacher: a moving average of the model, for objectives that ask for one."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hypjax.objectives import PairwiseCrossEntropy
from hypjax.training import optim, states
from hypjax.types import IMAGES, CachedFeatures
from tests.helpers.steps import learner_of, leaves, random_batch, sizes_of, start

DECAY = 0.9
FIELDS = (
    *("optim.schedule=constant", "optim.warmup_steps=0", "optim.frozen=patch_projection"),
    *("model.drop_path=0.5", "model.depth=2", "train.on_nonfinite=skip", "seed=7"),
)


@dataclasses.dataclass(frozen=True)
class Taught(PairwiseCrossEntropy):
    """Also draws the embeddings to the teacher's, counts steps, and reports what it is given."""

    teacher_decay = DECAY

    def init(self, key, spec):
        return {}, {"steps": jnp.zeros(())}

    def loss(self, state, outputs, teacher, key):
        loss, _ = super().loss(outputs)
        loss += jnp.mean((outputs.projected - teacher.projected) ** 2)
        given = {"student": outputs, "teacher": teacher, "key": jax.random.key_data(key)}
        return loss, ({"steps": state["steps"] + 1}, given)


@pytest.fixture
def begun(load_glyphs):
    """Returns the learner, the first state and the step of a run of `Taught`."""

    def begin(*overrides):
        config = load_glyphs(*FIELDS, *overrides)
        taught = Taught(learner_of(config).objective.space, 0.2, 2)
        return learner_of(config, objective=taught), *start(config, objective=taught)

    return begin


@pytest.mark.slow
def test_it_embeds_the_same_pixels_without_stochastic_depth(begun):
    learner, state, step = begun()
    for i in range(2):
        batch = random_batch(i)._replace(flips=np.arange(24) % 3 == 0)
        teacher = jax.tree.map(np.asarray, state.teacher)
        teacher["encoder"]["patch_embed"] = state.params["model"]["encoder"]["patch_embed"]
        pixels = batch.inputs["images"]
        pixels = np.where(batch.flips[:, None, None, None], pixels[:, :, ::-1], pixels)
        images = (pixels / np.float32(255) - 0.085) / 0.24
        expected = jax.jit(learner.model.apply)({"params": teacher}, images)
        state, given = step(state, batch)
        for shown, value in zip(given["teacher"], expected, strict=True):
            np.testing.assert_allclose(shown, value, rtol=1e-4, atol=1e-4)
        assert np.abs(given["student"].projected - given["teacher"].projected).max() > 0.01


def test_it_starts_from_the_pretrained_weights(begun, load_glyphs):
    learner, random, _ = begun()
    ones = jax.tree.map(np.ones_like, random.params["model"]["encoder"])
    state = states.first_state(learner, sizes_of(load_glyphs(*FIELDS)), {"encoder": ones})
    heads = [x.params["model"]["head"]["kernel"] for x in (state, random)]
    np.testing.assert_array_equal(*heads)
    trained, _ = optim.split_frozen(state.params, ["patch_projection"])
    for name, value in leaves(trained["model"]).items():
        np.testing.assert_array_equal(leaves(state.teacher)[name], value)
        assert "head" in name or np.all(value == 1)
    buffers = [x.unsafe_buffer_pointer() for x in jax.tree.leaves((state.teacher, state.params))]
    assert len({*buffers}) == len(buffers)  # The step overwrites both.


@pytest.mark.slow
def test_it_works_on_cached_features_and_frozen_models(begun):
    cached = ("train.cached_features=True", "model.drop_path=0")
    _, state, step = begun("optim.frozen=encoder", *cached)
    assert state.teacher.keys() == {"head"}
    features = np.random.default_rng(0).normal(size=(24, 32)).astype(np.float32)
    for i in range(2):
        head = jax.tree.map(np.asarray, state.teacher["head"])
        state, given = step(
            state, random_batch()._replace(inputs={IMAGES: CachedFeatures(features)})
        )
        expected = features @ head["kernel"] + head["bias"]
        np.testing.assert_allclose(given["teacher"].projected, expected, rtol=1e-4, atol=1e-4)
        key = jax.random.fold_in(jax.random.key(7), i)  # Of seed and step alone.
        np.testing.assert_array_equal(given["key"], jax.random.key_data(key))
    _, state, step = begun("optim.frozen=encoder,head", *cached)
    assert state.teacher == {}
    state, given = step(state, random_batch()._replace(inputs={IMAGES: CachedFeatures(features)}))
    np.testing.assert_array_equal(given["teacher"].projected, given["student"].projected)


def test_nothing_is_kept_where_no_objective_asks(load_glyphs):
    config = load_glyphs()
    state, _ = start(config)
    assert state.teacher is None and state.average is None
    saved = states.trees(learner_of(config), state)
    assert not {"teacher", "average", "model"} & saved["training"].keys()
    assert saved["model"] is state.params["model"]
