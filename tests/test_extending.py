"""The objective that docs/extending.md shows does what the page says."""

import json

import jax
import numpy as np
import pytest

from hypjax import train
from hypjax.objectives import Objective
from hypjax.objectives.create import OBJECTIVES
from hypjax.runs.checkpoints import Checkpoints
from hypjax.training.setup import build
from hypjax.training.states import random_state
from tests.helpers import shown_objective, small_runs
from tests.helpers.steps import leaves


@pytest.fixture
def module(monkeypatch):
    return shown_objective.install(monkeypatch)


def test_it_is_short_and_its_own_test_passes(module):
    code, _, test = shown_objective.blocks()
    lines = [line for line in code.splitlines() if line.strip()]
    assert len(lines) < 60 and isinstance(module.ProxySoftmax(None, 0.2, 0.9), Objective)
    assert not OBJECTIVES[shown_objective.NAME].by_class
    names = {}
    exec(test, names)
    names["test_equals_a_plain_loop"]()


@pytest.mark.slow
def test_a_run_has_its_teacher_its_state_and_its_group(module, photos_folder, tmp_path):
    rate, decay = 1e-4, 0.7
    config = small_runs.load(
        photos_folder,
        *(f"objective.name={shown_objective.NAME}", f"objective.teacher_decay={decay}"),
        *("train.total_steps=3", "run.checkpoint_every=1", "run.log_every=1", "eval.every=0"),
        *("train.sampling=shuffled", "data.validation_classes=0", "optim.warmup_steps=0"),
        *(f"optim.learning_rate={rate}", "optim.schedule=constant"),
    )
    train.train_and_evaluate(config, tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    for line in [line for line in lines if "fit" in line]:
        assert line["loss"] == pytest.approx(line["fit"] + line["agreement"], rel=1e-5)
    setup = build(config)
    first = random_state(setup.learner, setup.spec)
    assert first.params["objective"]["proxies"].shape == (setup.spec.classes, 8)
    model, proxies = first.params["model"], first.params["objective"]
    training = (proxies, first.opt_state, first.objective_state, first.skipped, first.teacher)
    saved = Checkpoints(tmp_path / "checkpoints", read_only=True)
    (before, old), (after, new) = (
        saved.restore(step, model=model, training=training).trees for step in (2, 3)
    )

    followed = jax.tree.map(lambda t, p: decay * t + (1 - decay) * p, old[-1], after)
    for name, value in leaves(followed).items():
        np.testing.assert_allclose(leaves(new[-1])[name], value, rtol=1e-5, atol=1e-7)
    kept = 0.9 * old[2]["centre"]  # Logits are negative, so their mean falls.
    assert np.all(new[2]["centre"] < kept) and np.all(kept < 0)

    def moved(old, new):
        return max(
            float(np.abs(a - b).max())
            for a, b in zip(*map(jax.tree.leaves, (old, new)), strict=True)
        )

    assert 30 * rate < moved(old[0], new[0]) < 300 * rate
    assert moved(before, after) < 3 * rate
