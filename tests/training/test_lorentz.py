"""Runs on the hyperboloid beside runs in the ball, to which it is isometric."""

import json

import jax
import numpy as np
import pytest

from hypjax.config import load_config
from hypjax.geometry import Lorentz, PoincareBall
from hypjax.objectives import pairwise_cross_entropy
from hypjax.training import train
from tests.helpers import small_runs

CONFIG = str(small_runs.REPOSITORY / "configs/features.py")
FIELDS = [*small_runs.SHORT_FEATURES, "model.head_init=orthogonal", "model.head_dim=8"]
SPACES = ("lorentz", "poincare")


def test_losses_and_gradients_equal_those_of_the_ball(float64):
    features = np.random.default_rng(0).normal(size=(12, 5))
    given = {"labels": np.arange(12) // 2, "samples_per_class": 2}

    def loss(features, space):
        points = space.embed(features)
        return pairwise_cross_entropy(points, **given, space=space, temperature=0.2)

    gradients = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
    for c in (0.0, 0.1, 1.0):
        ours, theirs = (gradients(features, space(c, 2.3)) for space in (Lorentz, PoincareBall))
        np.testing.assert_allclose(ours[0], theirs[0], rtol=1e-12)
        np.testing.assert_allclose(ours[1][0], theirs[1][0], rtol=1e-8, atol=1e-14)
        np.testing.assert_allclose(ours[1][1].c, theirs[1][1].c, rtol=1e-8)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A file of features, and runs on it in both spaces."""
    folder, rng = tmp_path_factory.mktemp("runs"), np.random.default_rng(0)
    labels = np.repeat(np.arange(12), 4)
    features = (rng.normal(size=(12, 16))[labels] + rng.normal(size=(48, 16))).astype(np.float32)
    np.savez(folder / "f.npz", features=features, labels=np.array(list("abcdefghijkl"))[labels])
    for space in SPACES:
        fields = [*FIELDS, f"data.path={folder / 'f.npz'}", f"objective.space={space}"]
        train.train_and_evaluate(load_config(CONFIG, fields), folder / space)
    return folder


@pytest.mark.slow
def test_a_run_takes_the_steps_of_one_in_the_ball(runs):
    ours, theirs = (small_runs.step_metrics(runs / name) for name in SPACES)
    assert ours.keys() == theirs.keys() and len(ours) >= 6
    for step, values in theirs.items():
        np.testing.assert_allclose(ours[step], values, rtol=1e-4)
    scores = [json.loads((runs / name / "results.json").read_text()) for name in SPACES]
    assert scores[0]["final"] == scores[1]["final"]
