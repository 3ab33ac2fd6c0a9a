"""HAPPIER: its bound of the hierarchical average precision, and its objective and batches."""

import jax
import numpy as np
import pytest

from hypjax import train
from hypjax.config import load_config
from hypjax.errors import UserError
from hypjax.objectives import Group, ProblemSizes, relevances, smooth_hap
from hypjax.training.setup import build
from tests.helpers import small_runs
from tests.helpers.losses import objective

SPEC = ProblemSizes(4, 2, 16, 5, 100, 8, coarse_labels=((1, 0, 1, 2), (0, 0, 0, 1)))
FINE = np.repeat(np.arange(4), 3)
LABELS = np.stack([FINE, FINE // 2])


def hap(scores, rel):
    """H-AP of one query from its definition, ties counted against each other."""
    before = scores >= scores[:, None]
    hrank = np.sum(np.minimum(rel, rel[:, None]) * before, axis=1)
    return np.sum(hrank / np.sum(before, axis=1)) / np.sum(rel)


def test_a_perfect_ranking_has_loss_0_and_others_more_than_1_minus_their_h_ap():
    rel = np.asarray(relevances(LABELS))
    np.testing.assert_allclose(rel[0], [1 / 3] * 3 + [1 / 6] * 3 + [0] * 6, rtol=1e-6)
    level = (LABELS[:, :, None] == LABELS[:, None]).sum(axis=0)
    assert smooth_hap(level / 2.0, rel) < 1e-6
    rng = np.random.default_rng(0)
    for spread in (0.1, 1.0):
        scores = np.float32(level * 0.05 + spread * rng.uniform(-1, 0, size=level.shape))
        np.fill_diagonal(scores, 1)
        below = 1 - np.mean([*map(hap, scores, rel)])
        assert smooth_hap(scores, rel) >= below - 1e-6 and below > 0.01


def test_images_of_equal_relevance_may_come_in_any_order():
    # The query's class has four images, its coarse class two others: 1 · 1/4 = 1/2 · 1/2.
    labels = np.array([[0, 0, 0, 0, 1, 2, 3, 4], [0, 0, 0, 0, 0, 0, 1, 1]])
    rel = np.asarray(relevances(labels))[:1]
    np.testing.assert_allclose(rel, [[0.25] * 6 + [0, 0]])
    for order in ([0, 1, 2, 3, 4, 5], [5, 3, 1, 4, 2, 0]):
        scores = np.float32([*(1 - 0.1 * np.array(order)), 0, 0])[None]
        assert smooth_hap(scores, rel) < 1e-6
    assert smooth_hap(np.zeros((1, 8)), rel) == pytest.approx(1 - 6 / 7)  # All are equal.


def test_large_batches_are_compared_in_blocks_with_the_same_gradient(monkeypatch):
    scores = np.random.default_rng(0).normal(size=(12, 12)).astype(np.float32)
    gradient = jax.grad(lambda s: smooth_hap(s, relevances(LABELS)))
    whole = gradient(scores)
    monkeypatch.setattr("hypjax.objectives.happier._COMPARISONS", 5 * 12**2)
    np.testing.assert_allclose(gradient(scores), whole, rtol=1e-5, atol=1e-7)
    assert np.isfinite(gradient(np.zeros_like(scores))).all()


def test_proxies_have_a_rate_without_decay_and_classes_need_coarse_classes():
    built = objective("happier", proxy_rate=7.0, space="sphere")
    params, state = built.init(jax.random.key(0), SPEC)
    assert built.groups == (Group(("base", "proxies"), rate=7.0, weight_decay=0.0),)
    assert params["base"]["proxies"].shape == (4, 5)
    assert state["coarse"].tolist() == [[1, 0, 1, 2], [0, 0, 0, 1]]
    with pytest.raises(UserError, match="needs coarse classes"):
        built.init(jax.random.key(0), SPEC._replace(coarse_labels=()))


@pytest.fixture
def features(tmp_path):
    """Features of 16 classes, 12 of them for training, in three coarse classes."""
    path, rng, labels = tmp_path / "features.npz", np.random.default_rng(0), np.repeat(range(16), 5)
    centres = rng.normal(size=(16, 8)) + 2 * rng.normal(size=(3, 8))[np.arange(16) % 3]
    given = np.float32(centres[labels] + rng.normal(size=(80, 8)))
    coarse = labels % 3
    splits = np.where(labels < 12, "train", "test")
    np.savez(path, features=given, labels=labels, coarse_labels=coarse, splits=splits)
    return path


def load(path, *fields):
    own = ("objective.name=happier", "objective.space=sphere", "train.sampling=coarse_pairs")
    sizes = ("train.batch_size=24", "train.samples_per_class=3", "train.total_steps=40")
    config = str(small_runs.REPOSITORY / "configs/features.py")
    short = [field for field in small_runs.SHORT_FEATURES if "validation_classes" not in field]
    held = "data.validation_classes=0"
    return load_config(config, [*short, *own, *sizes, held, f"data.path={path}", *fields])


def test_a_run_with_batches_of_two_coarse_classes_lowers_its_loss(features, tmp_path):
    results = train.train_and_evaluate(load(features), tmp_path / "run")
    losses = [loss for loss, *_ in small_runs.step_metrics(tmp_path / "run").values()]
    assert np.mean(losses[-3:]) < 0.5 * losses[0]
    assert 0 < results["final"]["head"]["recall@1"] <= 1


def test_batches_that_coarse_classes_cannot_fill_are_refused(features, tmp_path):
    with pytest.raises(UserError, match="at most 24: 3 images for each class of the two smallest"):
        build(load(features, "train.batch_size=27"))
    given = dict(np.load(features))
    np.savez(tmp_path / "one.npz", **given | {"coarse_labels": np.repeat("one", 80)})
    with pytest.raises(UserError, match="unless training classes lie in two or more coarse"):
        build(load(tmp_path / "one.npz"))
