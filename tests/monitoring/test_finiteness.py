"""Losses and gradients that are not finite."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hypjax import train
from hypjax.errors import UserError
from hypjax.objectives import Spec
from hypjax.training.setup import build_learner
from hypjax.training.step import create_state, make_train_step
from hypjax.types import Batch
from tests.helpers import small_runs

EXPLODES = ("optim.learning_rate=1e15", "optim.warmup_steps=0", "run.checkpoint_every=1")


def test_a_run_stops_and_names_step_images_and_the_last_good_checkpoint(photos_folder, tmp_path):
    with pytest.raises(UserError) as caught:
        train.train_and_evaluate(small_runs.load(photos_folder, *EXPLODES), tmp_path)
    message = str(caught.value)
    assert "of step 2 is nan (images " in message or "of step 2 is inf (images " in message
    assert "and 5 others, listed in nonfinite.json" in message
    assert "the last good checkpoint is of step 1. Lower optim.learning_rate" in message
    told = json.loads((tmp_path / "nonfinite.json").read_text())
    assert told["step"] == 2 and len(told["images"]) == 8
    first = told["images"][0]
    assert f"images {first['id']} ({first['name']}), " in message
    assert photos_folder.name in first["name"]
    assert sorted(folder.name for folder in (tmp_path / "checkpoints").iterdir()) == ["1"]


@pytest.mark.slow
def test_skipping_has_a_limit(photos_folder, tmp_path, capsys):
    config = small_runs.load(
        photos_folder,
        *EXPLODES,
        *("train.on_nonfinite=skip", "train.max_nonfinite=3", "eval.every=0"),
    )
    with pytest.raises(UserError, match="of step 5 is .* after 3 skipped updates"):
        train.train_and_evaluate(config, tmp_path)
    printed = capsys.readouterr().err
    assert printed.count("its update is skipped") == 3
    assert "3 of 3 so far" in printed


class Poisoned:
    """An objective whose loss is not finite where a batch holds image 99."""

    def __init__(self, healthy):
        self.healthy = healthy

    def __getattr__(self, name):
        return getattr(self.healthy, name)

    def loss(self, params, state, outputs, teacher, batch, key):
        loss, aux = self.healthy.loss(params, state, outputs, teacher, batch, key)
        return loss * jnp.where(jnp.any(batch.ids == 99), jnp.nan, 1.0), aux


@pytest.mark.slow
@pytest.mark.parametrize("memory", [0, 20])
def test_a_skipped_step_changes_nothing_but_the_counts_and_a_memory(photos_folder, memory):
    chosen = ["objective.name=contrastive", f"objective.memory={memory}"] if memory else []
    config = small_runs.load(
        photos_folder, "train.on_nonfinite=skip", "optim.warmup_steps=0", *chosen
    )
    learner = build_learner(config)
    learner = dataclasses.replace(learner, objective=Poisoned(learner.objective))
    state = create_state(learner, Spec(4, 2, config.model.width, config.model.head_dim, 24, 8))
    step = jax.jit(make_train_step(learner))
    pixels = np.random.default_rng(0).integers(0, 256, (8, 16, 16, 3), dtype=np.uint8)
    labels, flips = np.repeat(np.arange(4, dtype=np.int32), 2), np.zeros(8, bool)
    good = Batch(pixels, labels, np.arange(8, dtype=np.int32), flips)
    bad = good._replace(ids=np.arange(92, 100, dtype=np.int32))
    trained, metrics = step(state, good)
    assert metrics["finite"] and metrics["skipped"] == 0
    after, metrics = step(trained, bad)
    assert not metrics["finite"] and metrics["skipped"] == after.skipped == 1
    assert after.step == 2
    if memory:
        remembered = after.objective_state["memory"]
        assert (int(remembered.place), int(jnp.sum(remembered.labels >= 0))) == (16, 16)
    kept = after._replace(
        step=trained.step, skipped=trained.skipped, objective_state=trained.objective_state
    )
    for a, b in zip(jax.tree.leaves(kept), jax.tree.leaves(trained), strict=True):
        np.testing.assert_array_equal(a, b)
