"""Principal components against closed forms and singular vectors of NumPy; prefixes of points."""

import dataclasses

import jax
import numpy as np
import pytest

from hypjax.errors import UserError
from hypjax.geometry import Fused, Lorentz, PoincareBall, Sphere
from hypjax.retrieval import nearest_among, prefix_points, projection
from hypjax.retrieval.embeddings import Embeddings
from hypjax.retrieval.postprocessing import Postprocessing
from hypjax.retrieval.projection import Projection, fit
from tests.helpers.exact_order import true_order
from tests.helpers.galleries import points

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


def test_what_cannot_be_fitted_is_refused():
    for n, dim, keyword in [(60, 7, "7 dimensions"), (1, 1, "vary along 0")]:
        with pytest.raises(UserError, match=keyword):
            fit(varied(FLAT, n=n), space=FLAT, dim=dim)


def test_files_hold_the_projection(tmp_path):
    actual = fit(varied(Sphere()), space=Sphere(), dim=3, whiten=True)
    actual.save(tmp_path / "p.npz")
    x = varied(Sphere(), seed=1)
    read = Projection.load(tmp_path / "p.npz", Sphere())
    np.testing.assert_array_equal(read.apply(x), actual.apply(x))


UNCLIPPED = [
    *(SPHERE, PoincareBall(0.1, None), Lorentz(0.1, None)),
    Fused(((SPHERE, 1.0), (PoincareBall(0.1, 2.3), 2.0)), normalized=True),
]


def features(n, dim=12):
    return np.random.default_rng(0).normal(size=(n, dim)).astype(np.float32)


@pytest.mark.parametrize("space", UNCLIPPED, ids=str)
def test_prefixes_of_points_are_those_of_their_features(space):
    x = features(37)
    x = x / np.linalg.norm(x, axis=1, keepdims=True) if isinstance(space, Fused) else x
    actual = prefix_points(space.embed(x), 5, space=space)
    assert actual.dtype == np.float32
    np.testing.assert_allclose(actual, space.embed(x[:, :5]), atol=1e-6)


@pytest.mark.parametrize("space", [BALL, pytest.param(SPHERE, marks=pytest.mark.slow)], ids=str)
def test_candidates_are_the_nearest_by_the_prefix_and_ranked_by_all(space):
    queries, gallery = points(space, 0, 30, 12), points(space, 1, 120, 12)
    gallery[7] = queries[2]
    own_ids = np.where(np.arange(30) == 2, 7, -1)
    postprocessing = Postprocessing(prefix=4, candidates=20)
    distances, ids = postprocessing.search(queries, own_ids, gallery, k=3, space=space)
    short = [prefix_points(x, 4, space=space) for x in (queries, gallery)]
    order = zip(true_order(space, *short), own_ids, strict=True)
    listed = np.array([row[row != own_id][:20] for row, own_id in order])
    with jax.enable_x64(True):
        all_distances = np.asarray(
            jax.jit(space.distance)(np.float64(queries)[:, None], np.float64(gallery))
        )
    near = np.take_along_axis(all_distances, listed, axis=1)
    order = np.argsort(near, axis=1)[:, :3]
    np.testing.assert_array_equal(ids, np.take_along_axis(listed, order, axis=1))
    np.testing.assert_allclose(distances, np.take_along_axis(near, order, axis=1), rtol=1e-6)
    assert (ids != true_order(space, queries, gallery)[:, :3]).any()


def test_ties_are_in_the_order_of_the_gallery(tmp_path):
    x = points(BALL, 0, 50, 12)
    x[[9, 30]] = x[4]
    np.save(tmp_path / "x.npy", x)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    candidates = np.random.default_rng(0).permuted(np.tile(np.arange(20, 50), (50, 1)), axis=1)
    candidates = np.pad(candidates, [(0, 0), (2, 0)], constant_values=9)
    candidates[:, 0] = 4
    distances, ids = nearest_among(x, candidates, mapped, k=3, space=BALL)
    assert ids[4].tolist() == [4, 9, 30] and not distances[4].any()
    with pytest.raises(UserError, match="candidates must be indices of the gallery"):
        nearest_among(x, candidates + 1, mapped, k=3, space=BALL)  # Of 50 items, item 50.


def test_a_prefix_of_embeddings_is_a_gallery(tmp_path):
    x = 3 * features(20)
    embeddings = Embeddings.from_arrays(x, list("ab") * 10, space=BALL)
    short = embeddings.prefix(5)  # Of features that were given, before they are clipped.
    np.testing.assert_allclose(short.vectors, BALL.embed(x[:, :5]), atol=1e-6)
    short.save(tmp_path / "short.npz")
    loaded = Embeddings.load(tmp_path / "short.npz")
    np.testing.assert_array_equal(loaded.vectors, short.vectors)
    np.testing.assert_array_equal(loaded.labels, embeddings.labels)
    without_raw = dataclasses.replace(short, raw_features=None)
    np.testing.assert_array_equal(
        without_raw.prefix(3).vectors, prefix_points(without_raw.vectors, 3, space=BALL)
    )
