"""Saved and restored states."""

import jax
import numpy as np
import pytest

from hypjax.runs.checkpoints import Checkpoints
from hypjax.training import states
from tests.helpers.steps import learner_of, random_batch, start


@pytest.mark.slow
def test_a_restored_state_goes_on_as_the_saved_one(load_glyphs, tmp_path):
    """With a memory, a teacher, noise, adapters and an average; the step is not compiled again."""
    taught = ("objective.memory=40", "objective.memory_decay=0.9", "model.drop_path=0.5")
    tuned = ("train.lora_rank=2", "train.ema_decay=0.9")
    config = load_glyphs(*taught, *tuned, "model.depth=2", variant="irt-r")
    learner, (state, step) = learner_of(config), start(config)
    for i in range(2):
        state, _ = step(state, random_batch(i))
    assert state.objective_state["memory"].place == 8 and state.teacher is not None
    checkpoints = Checkpoints(tmp_path)
    recalls = states.Measured({"test": {"head": {"recall@1": 0.5}}}, best_steps=[0])
    checkpoints.save(2, record=recalls._asdict(), **states.trees(learner, state))
    checkpoints.close()
    fresh, _ = start(config)
    saved = Checkpoints(tmp_path)
    restored, remembered = states.restore(saved, learner, fresh)
    assert remembered == recalls
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    for a, b in zip(jax.tree.leaves(restored), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(a, b)
    ends = []
    for end in (state, restored):
        for i in range(2, 4):
            end, _ = step(end, random_batch(i))
        ends.append(jax.tree.leaves(end))
    for a, b in zip(*ends, strict=True):
        np.testing.assert_array_equal(a, b)
    assert step._cache_size() == 1


ON_FEATURES = (
    *("optim.frozen=encoder", "train.cached_features=True", "train.on_nonfinite=skip"),
    *("train.ema_decay=0.5", "optim.warmup_steps=5", "optim.learning_rate=0.01"),
)


def test_averages_follow_updated_parameters_and_skipped_updates_are_restored(load_glyphs, tmp_path):
    """Of five steps on features, the third is skipped; the state after the fourth is restored."""
    config = load_glyphs(*ON_FEATURES)
    learner, (state, step) = learner_of(config), start(config)
    features = np.random.default_rng(0).normal(size=(24, 32)).astype(np.float32)

    def train(state, i):
        images = features * (np.nan if i == 2 else 1)
        return step(state, random_batch()._replace(images=images))

    average, updates = np.array(state.params["model"]["head"]["kernel"]), 0
    for i in range(4):
        state, metrics = train(state, i)
        assert bool(metrics["finite"]) == (i != 2)
        if i != 2:  # The decay warms up: see timm's ModelEmaV3.
            share = max(0.5, (1 + updates) ** (-2 / 3))
            average += share * (state.params["model"]["head"]["kernel"] - average)
            updates += 1
        np.testing.assert_allclose(state.average["head"]["kernel"], average, rtol=1e-5, atol=1e-7)
    checkpoints = Checkpoints(tmp_path)
    record = states.Measured(untrained={})._asdict()
    checkpoints.save(4, record=record, **states.trees(learner, state))
    checkpoints.close()
    zeros = jax.tree.map(lambda x: jax.device_put(np.zeros(x.shape, x.dtype), x.sharding), state)
    restored, _ = states.restore(Checkpoints(tmp_path), learner, zeros)
    assert restored.skipped == 1 and restored.step == 4
    rates = [float(train(end, 4)[1]["learning_rate"]) for end in (state, restored)]
    assert rates[0] == rates[1] == pytest.approx(0.01 * 3 / 5)  # The rate after three updates.
