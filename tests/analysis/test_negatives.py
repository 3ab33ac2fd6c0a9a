"""Hard negatives: their weights and ranks against loops, and the choice of anchors."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest

from hypjax.analysis import negatives
from hypjax.analysis.negatives import choose, only_here, weigh
from hypjax.data.splits import Splits
from hypjax.errors import UserError
from hypjax.geometry import PoincareBall
from tests.helpers.pictures import dataset_without_images

BALL = PoincareBall(0.1, 2.3)


def splits(test, gallery=None):
    gallery = gallery and dataset_without_images(gallery)
    return Splits(None, None, dataset_without_images(test), gallery, "")


TEST = splits([0, 0, 1, 1, 1, 2, 2, 3, 3, 3])


def test_weights_agree_with_a_loop(monkeypatch):
    monkeypatch.setattr(negatives, "_BLOCK", 4)
    rng = np.random.default_rng(0)
    points = np.asarray(jax.jit(BALL.embed)(2 * rng.normal(size=(10, 3)).astype(np.float32)))
    choice = choose(TEST, [], 7, 5, 4)
    weighed = weigh("a", points[choice.anchors], points, choice, BALL, 0.2)
    curve, apart = np.zeros(8), np.asarray(jax.jit(BALL.distance)(points[:, None], points))
    for row, anchor in enumerate(choice.anchors):
        label = TEST.test.labels[anchor]
        distances = {i: apart[anchor, i] for i in range(10) if TEST.test.labels[i] != label}
        nearest = sorted(distances, key=distances.get)
        terms = np.exp([-distances[i] / 0.2 for i in nearest])
        matches = [i for i in range(10) if TEST.test.labels[i] == label and i != anchor]
        positives = np.exp([-apart[anchor, i] / 0.2 for i in matches])
        weights = np.mean([terms / (x + terms.sum()) for x in positives], axis=0)
        curve[: len(weights)] += weights / 7
        light = np.sum(np.cumsum(weights) < 0.9 * weights.sum())
        assert weighed["carriers_of_anchors"][row] == 1 + light
        if row < choice.num_listed:
            hardest = weighed["hardest"][row]
            assert (hardest["index"], hardest["label"]) == (anchor, f"class {label}")
            assert hardest["items"] == nearest[:4]
            assert hardest["positive"] == min(matches, key=lambda i: apart[anchor, i])
            assert hardest["classes"] == [f"class {TEST.test.labels[i]}" for i in nearest[:4]]
            shown = [distances[i] for i in nearest[:4]]
            np.testing.assert_allclose(hardest["distances"], shown, rtol=1e-5)
            np.testing.assert_allclose(hardest["weights"], weights[:4], rtol=1e-4)
    np.testing.assert_allclose(weighed["curve"]["weight"], curve, rtol=1e-4)
    assert len(weighed["hardest"]) == choice.num_listed == 5


def test_anchors_are_evenly_spaced_and_the_listed_anchors_come_first():
    for indices, num_anchors, limit, anchors, num_listed in (
        ([], 5, 2, [0, 9, 2, 4, 7], 2),
        ([], 1000, 99, [*range(10)], 10),
        ([8, 1], 1000, 0, [8, 1], 2),
    ):
        choice = choose(TEST, indices, num_anchors, limit, 1)
        assert (choice.anchors.tolist(), choice.num_listed) == (anchors, num_listed)


def test_images_without_a_positive_are_no_anchors():
    test = splits([0, 1, 1, 2])
    assert sorted(choose(test, [], 3, 1, 1).anchors) == [1, 2]
    with pytest.raises(UserError, match="without another image of its class"):
        choose(test, [3], 3, 1, 1)


def test_a_gallery_is_searched_instead_of_the_test_images():
    choice = choose(splits([0, 1], [0, 0, 1, 2]), [1], 1, 1, 2)
    points = np.array([[0.1], [0.0], [0.3], [0.2]], np.float32)
    at = [np.array([[x]], np.float32) for x in (0.25, 0.02)]
    runs = [weigh("a", anchor, points, choice, BALL, 0.2) for anchor in at]
    assert [run["hardest"][0]["items"] for run in runs] == [[3, 0], [1, 0]]
    assert only_here(runs, 0, 0) == [True, False] and only_here(runs[:1], 0, 0) == [False] * 2


def test_anchors_of_a_run_are_test_images_though_its_gallery_is_smaller(monkeypatch):
    def head_points(run, params, space, images):
        return np.asarray(images.labels[:, None] / 10, np.float32)

    monkeypatch.setattr(negatives, "head_points", head_points)
    monkeypatch.setattr(negatives, "restore_trained", lambda run: None)
    monkeypatch.setattr(negatives, "softmax_temperature", lambda *arguments: 0.2)
    objective = SimpleNamespace(space=BALL)
    method = SimpleNamespace(objective_fields={}, learned=lambda params: {})
    method.trained_objective = lambda params: objective
    run = SimpleNamespace(name="a", method=method)
    choice = choose(splits([0, 0, 1, 1, 2], [2, 1, 0]), [4], 1, 1, 2)
    assert negatives.weigh_run(run, choice)["hardest"][0]["items"] == [1, 2]
