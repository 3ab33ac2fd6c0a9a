"""Made galleries: clusters, and trees up to the boundary; and a check of what is found in them."""

import os

import jax
import numpy as np
import pytest

from hypjax.errors import UserError
from hypjax.galleries.embeddings import Embeddings
from hypjax.geometry import poincare
from hypjax.retrieval.neighbors import search

_embed = jax.jit(lambda space, features: space.embed(features))


def embeddings(points, space, first=0, fingerprint="model"):
    """Embeddings of images 0.png, 1.png and so on, whose classes alternate."""
    ids = np.array([f"{i}.png" for i in range(first, first + len(points))])
    labels = np.array(["odd", "even"])[np.arange(len(points)) % 2]
    return Embeddings(np.asarray(points), ids, labels, space, fingerprint, "images", {})


def points(space, seed, n, dim=5):
    """Embeddings of normally distributed features."""
    features = np.random.default_rng(seed).normal(size=(n, dim))
    return np.array(_embed(space, features.astype(np.float32)))


def clusters(space, count, dim=32, seed=0):
    """Points in 50 clusters."""
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(50, dim))
    features = centres[rng.integers(0, 50, count)] + 0.5 * rng.normal(size=(count, dim))
    return np.asarray(space.embed((0.4 * features).astype(np.float32)))


def labelled(space, n, classes, noise=1.0, dim=6, seed=0):
    """Points about the centres of their classes, and the numbers of these."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, classes, n)
    centres = np.random.default_rng(9).normal(size=(classes, dim))
    features = centres[labels] + noise * rng.normal(size=(n, dim))
    return np.array(_embed(space, features.astype(np.float32))), labels


def tree(c, dim, levels=8):
    """Points of a tree with three children each, whose leaves lie near the boundary."""
    rng = np.random.default_rng(0)
    found = [np.zeros((1, dim))]
    for _ in range(levels - 1):
        parents = np.repeat(found[-1], 3, axis=0)
        steps = rng.normal(size=parents.shape)
        steps *= np.tanh(0.7) / np.sqrt(c) / np.linalg.norm(steps, axis=1, keepdims=True)
        found.append(np.asarray(poincare.mobius_add(parents, steps, c)))
    return np.concatenate(found).astype(np.float32)


def check_wrong_points_are_refused(gallery, points, space):
    """Checks that a gallery does not search for what is no point of its space."""
    points = points.copy()
    for wrong, words in ((np.nan, "embedding 2 is not finite"), (9, "embedding 2 is outside the")):
        points[2] = wrong
        with pytest.raises(UserError, match=words):
            gallery.nearest(points, 3)


def found_in(gallery, queries, k, own=None):
    """Distances and numbers of the images that a gallery of `embeddings` finds, [n, k].

    `own` holds the numbers of the queries themselves.
    """
    paths = None if own is None else [os.path.realpath(f"{i}.png") for i in own]
    found = gallery.nearest(queries, k, paths)
    items = [[int(name.removesuffix(".png")) for name in hits.ids] for hits in found]
    shape = len(queries), k
    return np.reshape([hits.distances for hits in found], shape), np.reshape(items, shape)


def check_neighbours(found, queries, points, space, recall, own=None):
    """Checks distances and items, [n, k]: the share of true neighbours, order, and distances."""
    distances, items = found
    exact = search(queries, own, points, k=items.shape[1], space=space)[1]
    assert (exact[:, :, None] == items[:, None]).any(axis=2).mean() >= recall
    assert (np.diff(distances) >= 0).all()
    assert own is None or (items != own[:, None]).all()
    with jax.enable_x64(True):
        expected = space.distance(np.float64(queries)[:, None], np.float64(points)[items])
    np.testing.assert_allclose(distances, expected, rtol=1e-5, atol=1e-5)
