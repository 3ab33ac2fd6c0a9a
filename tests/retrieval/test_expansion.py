"""Query expansion against loops over the queries."""

import jax
import numpy as np
import pytest

from hypjax.errors import UserError
from hypjax.geometry import PoincareBall, Sphere, poincare
from hypjax.retrieval import expansion
from hypjax.retrieval.expansion import expand_queries
from tests.helpers.galleries import points

SPHERE, BALL = Sphere(), PoincareBall(0.3, 2.0)


def looped(space, queries, gallery, own_ids, k, alpha):
    """Means over sorted distances, in float64."""
    points, weights = [], []
    distances = np.asarray(space.distance(np.float64(queries)[:, None], np.float64(gallery)))
    for i, d in enumerate(distances):
        nearest = [j for j in np.argsort(d, kind="stable") if j != own_ids[i]][:k]
        similarities = 1 - d / 2 if space == SPHERE else np.exp(-d)
        points.append(np.float64([queries[i], *gallery[nearest]]))
        weights.append([1, *np.maximum(similarities[nearest], 0) ** alpha])
    points, weights = np.array(points), np.array(weights)
    if space == SPHERE:
        sums = np.einsum("nk,nkd->nd", weights, points)
        return sums / np.linalg.norm(sums, axis=1, keepdims=True)
    return jax.jit(poincare.frechet_mean)(points, space.c, weights)


@pytest.mark.parametrize("space", [SPHERE, BALL], ids=str)
@pytest.mark.parametrize("alpha", [0.0, 3.0])
def test_equals_a_loop(space, alpha, monkeypatch):
    monkeypatch.setattr(expansion, "_BLOCK_BYTES", 6400)
    queries, gallery = points(space, 0, 40), points(space, 1, 40)
    gallery[3] = queries[2]
    nowhere = np.full(40, -1)
    own_ids = np.where(np.arange(40) == 2, 3, -1)
    with jax.enable_x64(True):
        cases = [
            (looped(space, queries, gallery, nowhere, 7, alpha), (queries, gallery, None)),
            (looped(space, queries, gallery, own_ids, 7, alpha), (queries, gallery, own_ids)),
            (looped(space, gallery, gallery, np.arange(40), 7, alpha), (gallery, None, None)),
        ]
    for expected, (asked, searched, own) in cases:
        got = expand_queries(asked, searched, k=7, alpha=alpha, space=space, own_ids=own)
        assert got.dtype == np.float32
        np.testing.assert_allclose(got, expected, atol=3e-7)


def test_dissimilar_items_count_only_in_averages():
    queries = np.array([[1, 0]], np.float32)
    gallery = np.array([[0, 1], [-0.6, -0.8]], np.float32)
    weighted = expand_queries(queries, gallery, k=2, alpha=1.0, space=SPHERE)
    np.testing.assert_allclose(weighted, queries, atol=1e-7)
    average = expand_queries(queries, gallery, k=2, space=SPHERE)
    np.testing.assert_allclose(average, [np.array([0.4, 0.2]) / np.sqrt(0.2)], atol=1e-6)


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"k": 5, "alpha": -1.0}, "alpha is -1.0; it must be at least 0"),
        ({"k": 5}, "k is 5, but there are 4 items"),
        ({"k": 1.5}, "k is 1.5; it must be a whole number"),
    ],
)
def test_numbers_out_of_range_are_refused(numbers, message):
    with pytest.raises(UserError, match=message):
        expand_queries(points(SPHERE, 0, 5), space=SPHERE, **numbers)


@pytest.mark.parametrize("own_ids", [[99, 0], [-2, 0], [0], [0.5, 1.0]])
def test_own_ids_that_are_not_indices_are_an_error(own_ids):
    x = np.asarray(Sphere().embed(np.eye(4)))
    with pytest.raises(UserError, match="own_ids"):
        expand_queries(x[:2], x, k=1, space=Sphere(), own_ids=np.array(own_ids))
