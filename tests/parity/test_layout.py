"""The layout by UMAP."""

import numpy as np
import pytest

from hypjax.geometry import PoincareBall, layout

pytest.importorskip("umap", reason="needs the viz extra: umap-learn")


def test_neighbours_stay_together_inside_the_disk():
    ball, rng = PoincareBall(c=0.1, clip_radius=2.3), np.random.default_rng(0)
    labels = np.repeat(np.arange(10), 20)
    features = 2 * rng.normal(size=(10, 16))[labels] + 0.3 * rng.normal(size=(200, 16))
    points = np.asarray(ball.embed(features.astype(np.float32)))
    places = layout.lay_out_by_umap(points, ball)
    assert (np.abs(places) < 1).all()
    distances = np.abs((places[:, None] - places) / (1 - places[:, None].conj() * places))
    np.fill_diagonal(distances, np.inf)
    assert np.mean(labels[distances.argmin(axis=1)] == labels) > 0.95
    assert np.array_equal(places, layout.lay_out_by_umap(points, ball))
