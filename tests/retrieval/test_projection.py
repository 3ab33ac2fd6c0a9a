"""Principal components against closed forms and singular vectors of NumPy."""

import jax
import numpy as np
import pytest

from hypjax.errors import UserError
from hypjax.geometry import Fused, PoincareBall, Sphere
from hypjax.retrieval import projection
from hypjax.retrieval.projection import Projection, fit

FLAT = PoincareBall(0.0, None)  # Its points are its features.
SPHERE, BALL = Sphere(), PoincareBall(0.1, 2.3)
SPACES = [SPHERE, BALL, Fused(((BALL, 1.0), (Sphere(), 2.0)), normalized=False)]


def varied(space, n=60, dim=6, seed=0):
    features = np.random.default_rng(seed).normal(size=(n, dim)) * 0.8 ** np.arange(dim) + 0.3
    return np.asarray(space.embed(features.astype(np.float32)))


@pytest.mark.parametrize(
    ("space", "whiten"),
    [(SPACES[0], True), (BALL, False)]
    + [pytest.param(space, True, marks=pytest.mark.slow) for space in SPACES[1:]],
    ids=str,
)
def test_equals_singular_vectors_of_the_centred_features(space, whiten, monkeypatch):
    monkeypatch.setattr(projection, "_BLOCK_BYTES", 700)
    x = varied(space)
    with jax.enable_x64(True):
        features = np.asarray(space.features(np.float64(x)))
    centred = features - features.mean(axis=0)
    _, values, vectors = np.linalg.svd(centred, full_matrices=False)
    vectors *= np.sign(vectors[np.arange(6), np.abs(vectors).argmax(axis=1)])[:, None]
    variances = values[:4] ** 2 / 59
    projected = centred @ vectors[:4].T
    if whiten:
        projected *= np.sqrt(variances.mean() / variances)
    actual = fit(x, space=space, dim=4, whiten=whiten)
    np.testing.assert_allclose(actual.components, vectors[:4], atol=1e-8)
    np.testing.assert_allclose(actual.variances, variances, rtol=1e-8)
    reduced = actual.apply(x)
    space.check(reduced)
    assert reduced.dtype == np.float32
    np.testing.assert_allclose(reduced, space.embed(projected.astype(np.float32)), atol=1e-6)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_only_directions_in_which_points_vary_are_whitened(scale):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(50, 2)) * [1, 1e-4] @ rng.normal(size=(2, 6))
    x = (scale * x).astype(np.float32)
    fit(x, space=FLAT, dim=2, whiten=True)
    with pytest.raises(UserError, match="vary along 2 components; this PCA needs 3"):
        fit(x, space=FLAT, dim=3, whiten=True)


def test_what_cannot_be_fitted_is_refused():
    for n, dim, keyword in [(60, 7, "7 dimensions"), (1, 1, "vary along 0")]:
        with pytest.raises(UserError, match=keyword):
            fit(varied(FLAT, n=n), space=FLAT, dim=dim)

    of_three = fit(varied(FLAT), space=FLAT, dim=3)
    with pytest.raises(UserError, match="the points have 1 features, the projection takes 6"):
        of_three.apply(varied(FLAT, dim=1))


def test_files_hold_the_projection(tmp_path):
    actual = fit(varied(Sphere()), space=Sphere(), dim=3, whiten=True)
    actual.save(tmp_path / "p.npz")
    x = varied(Sphere(), seed=1)
    read = Projection.load(tmp_path / "p.npz", Sphere())
    np.testing.assert_array_equal(read.apply(x), actual.apply(x))
