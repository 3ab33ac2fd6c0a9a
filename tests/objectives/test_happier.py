"""HAPPIER: its bound of the hierarchical average precision, and runs with its batches."""

import jax
import numpy as np
import pytest

from hypjax import train
from hypjax.assemble import assemble_training
from hypjax.config import load_config
from hypjax.errors import UserError
from hypjax.objectives import Group, ProblemSizes, relevances, smooth_hap
from tests.helpers import small_runs
from tests.helpers.losses import objective

SPEC = ProblemSizes(4, 2, 16, 5, 100, 8, coarse_labels=((1, 0, 1, 2),))


def test_it_is_0_for_a_perfect_ranking_and_at_least_1_minus_h_ap(monkeypatch):
    fine = np.repeat(np.arange(4), 3)
    labels = np.stack([fine, fine // 2])
    rel = np.asarray(relevances(labels))
    np.testing.assert_allclose(rel[0], [1 / 3] * 3 + [1 / 6] * 3 + [0] * 6, rtol=1e-6)
    level = (labels[:, :, None] == labels[:, None]).sum(axis=0)
    assert smooth_hap(level / 2.0, rel) < 1e-6
    scores = np.float32(level * 0.05 - np.random.default_rng(0).uniform(size=level.shape))
    before = scores[:, None] >= scores[:, :, None]  # H-AP by its definition.
    hranks = np.sum(np.minimum(rel[:, None], rel[:, :, None]) * before, axis=2)
    exact = np.sum(hranks / np.sum(before, axis=2), axis=1) / np.sum(rel, axis=1)
    assert smooth_hap(scores, rel) >= 1 - np.mean(exact) - 1e-6 > 0.01
    gradients = jax.grad(smooth_hap)(scores, rel)
    monkeypatch.setattr("hypjax.objectives.happier._COMPARISONS", 5 * 12**2)  # Three blocks.
    np.testing.assert_allclose(jax.grad(smooth_hap)(scores, rel), gradients, rtol=1e-5, atol=1e-7)
    assert np.isfinite(jax.grad(smooth_hap)(0 * scores, rel)).all()


def test_images_of_equal_relevance_may_come_in_any_order():
    # The query's class has four images, its coarse class two others: 1 · 1/4 = 1/2 · 1/2.
    rel = relevances(np.array([[0, 0, 0, 0, 1, 2, 3, 4], [0, 0, 0, 0, 0, 0, 1, 1]]))[:1]
    for order in ([0, 1, 2, 3, 4, 5], [5, 3, 1, 4, 2, 0]):
        assert smooth_hap(np.float32([[*(1 - 0.1 * np.array(order)), 0, 0]]), rel) < 1e-6
    assert smooth_hap(np.zeros((1, 8)), rel) == pytest.approx(1 - 6 / 7)  # Ties: σ(0) = 1/2.


def test_proxies_do_not_decay_and_classes_need_coarse_classes():
    built = objective("happier", proxy_rate=7.0)
    assert built.groups == (Group(("base", "proxies"), rate=7.0, weight_decay=0.0),)
    with pytest.raises(UserError, match="needs coarse classes"):
        built.init(jax.random.key(0), SPEC._replace(coarse_labels=()))


def test_a_run_with_batches_of_two_coarse_classes_lowers_its_loss(tmp_path):
    rng, labels = np.random.default_rng(0), np.repeat(np.arange(16), 5)
    arrays = {"labels": labels, "splits": np.where(labels < 12, "train", "test")}
    centres = rng.normal(size=(16, 8)) + 2 * rng.normal(size=(3, 8))[np.arange(16) % 3]
    arrays["features"] = np.float32(centres[labels] + rng.normal(size=(80, 8)))
    np.savez(tmp_path / "three.npz", **arrays, coarse_labels=labels % 3)
    np.savez(tmp_path / "one.npz", **arrays, coarse_labels=0 * labels)
    short = [field for field in small_runs.SHORT_FEATURES if not field.startswith("data.")]
    short += ["objective.name=happier", "train.sampling=coarse_pairs", "train.samples_per_class=3"]
    short += ["data.validation_classes=0", "train.total_steps=40"]

    def load(name, batch):
        fields = [*short, f"data.path={tmp_path / name}.npz", f"train.batch_size={batch}"]
        return load_config(str(small_runs.REPOSITORY / "configs/features.py"), fields)

    with pytest.raises(UserError, match="at most 24: 3 images for each class of the smallest two"):
        assemble_training(load("three", 27))
    with pytest.raises(UserError, match="unless training classes lie in two or more coarse"):
        assemble_training(load("one", 24))
    train.train_and_evaluate(load("three", 24), tmp_path / "run")
    losses = [loss for loss, *_ in small_runs.step_metrics(tmp_path / "run").values()]
    assert np.mean(losses[-3:]) < 0.5 * losses[0]
