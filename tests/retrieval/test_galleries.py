"""Galleries whose images are arrays, against brute force."""

import os

import jax
import numpy as np
import pytest

from hypjax.errors import UserError
from hypjax.geometry import PoincareBall
from hypjax.retrieval.galleries import require_model
from tests.helpers.galleries import clusters, embeddings

SPACE = PoincareBall(0.1, 2.3)


@pytest.mark.parametrize("label", [None, "even"])
def test_all_but_the_query_are_found_in_order(label, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    points = clusters(SPACE, 30).copy()
    points[7] = points[3]
    gallery = embeddings(points, SPACE)
    (tmp_path / "link.png").symlink_to(tmp_path / "3.png")
    paths = [os.path.realpath("link.png"), "", str(tmp_path / "other.png")]
    with jax.enable_x64(True):
        distances = np.array(
            jax.jit(SPACE.distance)(np.float64(points[[3, 3, 5], None]), np.float64(points))
        )
    distances[0, 3] = np.inf
    if label:
        distances[:, gallery.labels != label] = np.inf
    for k in (4, 99):
        for row, actual in enumerate(gallery.nearest(points[[3, 3, 5]], k, paths, label)):
            expected = np.argsort(distances[row], kind="stable")
            expected = expected[np.isfinite(distances[row][expected])][:k]
            assert actual.ids == gallery.ids[expected].tolist()
            assert actual.labels == gallery.labels[expected].tolist()
            assert actual.keys == [str(i) for i in expected]
            np.testing.assert_allclose(actual.distances, distances[row][expected], atol=1e-5)
            assert actual.own_label == (gallery.labels[3] if row == 0 else "")
    assert gallery.nearest(points[:1], 3, None, "wren")[0].ids == []


def test_images_are_read_by_key_and_sampled_always_alike():
    gallery = embeddings(clusters(SPACE, 30), SPACE)
    assert gallery.classes() == ["even", "odd"]
    (item,) = gallery.read(["30", "-1", "x", "9" * 50, "4"])
    assert (item.key, item.path, item.label) == ("4", "4.png", "odd")
    np.testing.assert_array_equal(item.point, gallery.vectors[4])
    keys = [item.key for item in gallery.sample(10)]
    assert len(set(keys)) == 10 and keys == [item.key for item in gallery.sample(10)]
    require_model(gallery, "model")
    with pytest.raises(UserError, match="embedded by another run, not by runs/b"):
        require_model(gallery, "other", "runs/b")
