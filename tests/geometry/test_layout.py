"""Layouts in the Poincaré disk."""

import sys
import types

import numpy as np
import pytest

from hypjax.geometry import PoincareBall, Sphere, layout

BALL = PoincareBall(c=1.0, clip_radius=None)


def classes(rng, count=100, dim=32):
    """Embeddings of 40 classes, as retrieval learns them: no plane holds their distances."""
    centres = rng.normal(size=(40, dim))
    features = centres[rng.integers(0, 40, count)] + 0.3 * rng.normal(size=(count, dim))
    return features.astype(np.float32)


def test_distances_are_kept_better_than_by_principal_components():
    space = Sphere()
    points = np.asarray(space.embed(classes(np.random.default_rng(0))))
    positions = layout.lay_out(points, space)
    assert (np.abs(positions) < 1).all()
    actual, plain = layout.faithfulness(points, positions, space)
    assert actual > plain + 0.02 and actual > 0.4
    assert np.array_equal(layout.lay_out(points, space), positions)


def test_outliers_of_a_crowd_are_placed_inside_the_disk():
    x = np.random.default_rng(0).normal(size=(100, 32)) * 1e-3 + np.eye(32)[0]
    x[:3] = -np.eye(32)[:3]
    points = np.asarray(Sphere().embed(x.astype(np.float32)))
    positions = layout.lay_out(points, Sphere())
    among = layout.place_among(points[[0, 1, 30]], points, positions, Sphere())
    assert np.isfinite(among).all() and max(np.abs(positions).max(), np.abs(among).max()) < 1


def test_equal_points_have_one_place_and_one_coordinate_is_laid_out_on_a_line():
    points = np.repeat(np.asarray(BALL.embed(np.ones((1, 2)))), 30, axis=0)
    positions = layout.lay_out(points, BALL)
    assert np.abs(positions - positions[0]).max() < 1e-3
    features = np.linspace(-1, 1, 9, dtype=np.float32)[:, None]
    assert not layout.principal_components(features)[:, 1].any()


def test_points_of_the_plane_keep_their_distances():
    ball = BALL
    points = np.asarray(ball.embed(np.random.default_rng(1).normal(size=(30, 2))))
    positions = layout.lay_out(points, ball)
    assert layout.faithfulness(points, positions, ball)[0] > 0.98
    again = layout.place_among(points[[3]], points, positions, ball)
    assert abs(again[0] - positions[3]) < 0.05
    positions = points[:, 0] + 1j * points[:, 1]
    faithful, plain = layout.faithfulness(points, positions, ball)
    assert faithful == pytest.approx(1, abs=1e-6) and 0.5 < plain < faithful - 1e-4
    assert layout.faithfulness(points[:2], positions[:2], ball) is None


def test_umap_starts_from_the_layout_on_the_hyperboloid(monkeypatch):
    """A UMAP that moves nothing returns that layout."""

    class Still:
        def __init__(self, *, init, **_):
            self.fit_transform = lambda _: init

    monkeypatch.setitem(sys.modules, "umap", types.SimpleNamespace(UMAP=Still))
    monkeypatch.setattr(layout, "require_package", lambda *_: None)
    points = np.asarray(Sphere().embed(classes(np.random.default_rng(0))))
    actual = layout.lay_out_by_umap(points, Sphere())
    np.testing.assert_allclose(actual, layout.lay_out(points, Sphere()), atol=1e-5)


def test_features_without_a_direction_are_laid_out_twice_alike():
    for x in (np.full((50, 128), 0.5), np.repeat(np.eye(128), 4, axis=0)):
        points = np.asarray(BALL.embed(x.astype(np.float32)))
        places = layout.lay_out(points, BALL)
        np.testing.assert_array_equal(layout.lay_out(points, BALL), places)
        assert np.isfinite(places).all()
