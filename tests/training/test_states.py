"""Saved and restored states."""

import jax
import numpy as np
import pytest

from hypjax.runs.checkpoints import Checkpoints
from hypjax.training import states
from hypjax.types import IMAGES, CachedFeatures
from tests.helpers.steps import learner_of, random_batch, start


def test_averages_follow_updated_parameters_and_skipped_updates_are_restored(load_glyphs, tmp_path):
    """Of five steps on features, the third is skipped; the state after the fourth is restored."""
    rates = "train.ema_decay=0.5", "optim.warmup_steps=5", "optim.learning_rate=0.01"
    features = "optim.frozen=encoder", "train.cached_features=True"
    config = load_glyphs(*features, *rates, "train.on_nonfinite=skip")
    learner, (state, step) = learner_of(config), start(config)
    features = np.random.default_rng(0).normal(size=(24, 32)).astype(np.float32)

    def train(state, i):
        values = CachedFeatures(features * (np.nan if i == 2 else 1))
        return step(state, random_batch()._replace(inputs={IMAGES: values}))

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
    assert step._cache_size() == 1  # The restored state is laid out as the saved one.
