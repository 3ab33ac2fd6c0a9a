"""k-reciprocal re-ranking against a plain transcription of the paper's equations."""

import jax
import numpy as np
import pytest

from hypjax.errors import UserError
from hypjax.geometry import PoincareBall, Sphere
from hypjax.retrieval import nearest_neighbors
from hypjax.retrieval.reranking import Reranking, rerank
from tests.helpers.galleries import labelled

BALL = PoincareBall(0.1, 2.3)


def distances_of(space, points):
    with jax.enable_x64(True):
        x = np.asarray(points, np.float64)
        return np.asarray(space.distance(x[:, None], x[None]))


def transcription(d, k1, k2, weight):
    """Eq. 3 to 12 for all pairs of items with the distances d, by loops."""
    items = range(len(d))
    order = [sorted(items, key=lambda g, p=p: (g != p, d[p, g], g)) for p in items]

    def nearest(p, k):  # Eq. 2: p itself and its k nearest others.
        return set(order[p][: k + 1])

    def reciprocal(p, k):  # Eq. 3
        return {g for g in nearest(p, k) if p in nearest(g, k)}

    encodings = np.zeros(d.shape)
    for p in items:
        near = reciprocal(p, k1)
        expanded = set(near)
        for q in near:  # Eq. 4
            half = reciprocal(q, k1 // 2)
            if len(near & half) >= 2 / 3 * len(half):
                expanded |= half
        for g in expanded:  # Eq. 7
            encodings[p, g] = np.exp(-d[p, g])
    averaged = np.array([np.mean([encodings[g] for g in order[p][:k2]], axis=0) for p in items])
    final = np.empty(d.shape)
    for p in items:
        for g in items:  # Eq. 10 and 12
            common = np.minimum(averaged[p], averaged[g]).sum()
            jaccard = 1 - common / np.maximum(averaged[p], averaged[g]).sum()
            final[p, g] = (1 - weight) * jaccard + weight * d[p, g]
    return final


def sorted_within(first, final):
    """The first results of each query by their final distances."""
    return np.array([row[np.argsort(final[i][row], kind="stable")] for i, row in enumerate(first)])


@pytest.mark.parametrize(
    ("space", "numbers"),
    [
        (BALL, (20, 6, 0.3, 30)),
        (Sphere(), (7, 1, 0.0, 119)),
        (PoincareBall(1.0, 0.8), (1, 2, 0.5, 5)),
    ],
    ids=str,
)
def test_equals_the_equations_where_each_item_is_a_query(space, numbers):
    x, _ = labelled(space, 120, 8, noise=0.6)
    _, first = nearest_neighbors(x, x, k=numbers[3], space=space, exclude_self=True)
    final = transcription(distances_of(space, x), *numbers[:3])
    got, ids = rerank(x, space=space, numbers=Reranking(*numbers))
    np.testing.assert_array_equal(ids, sorted_within(first, final))
    np.testing.assert_allclose(got, np.take_along_axis(final, ids, 1), rtol=1e-5, atol=1e-6)
    assert not (ids == np.arange(120)[:, None]).any()


@pytest.mark.slow
def test_items_are_the_gallery_and_the_queries_outside_it():
    space = BALL
    gallery, _ = labelled(space, 90, 8, noise=0.6, seed=1)
    outside, _ = labelled(space, 10, 8, noise=0.6, seed=2)
    final = transcription(distances_of(space, np.concatenate([gallery, outside])), 20, 6, 0.3)
    _, first = nearest_neighbors(outside, gallery, k=40, space=space)
    _, ids = rerank(outside, gallery, space=space, numbers=Reranking(depth=40))
    np.testing.assert_array_equal(ids, sorted_within(first, final[90:, :90]))
    queries, own_ids = np.concatenate([outside, gallery[5:7]]), np.array([-1] * 10 + [5, 6])
    _, ids = rerank(queries, gallery, space=space, own_ids=own_ids, numbers=Reranking(depth=40))
    np.testing.assert_array_equal(ids[:10], sorted_within(first, final[90:, :90]))
    _, first = nearest_neighbors(gallery, gallery, k=40, space=space, exclude_self=True)
    np.testing.assert_array_equal(ids[10:], sorted_within(first[5:7], final[5:7]))


def test_results_do_not_depend_on_which_items_are_searched_for():
    x, _ = labelled(Sphere(), 120, 8, noise=0.6)
    whole = rerank(x, space=Sphere(), numbers=Reranking(depth=10))
    own_ids = np.array([7, 30])
    one = rerank(x[own_ids], x, own_ids=own_ids, space=Sphere(), numbers=Reranking(depth=10))
    for got, expected in zip(one, whole, strict=True):
        np.testing.assert_array_equal(got, expected[own_ids])


def test_two_items_are_enough():
    x, _ = labelled(Sphere(), 2, 8, noise=0.6, seed=6)
    distances, ids = rerank(x, space=Sphere())
    assert distances.shape == (2, 1) and ids.tolist() == [[1], [0]]


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"k1": 0}, "k1 is 0; it must be at least 1"),
        ({"k1": 3}, "k2 is 6; it must be at most k1 .*, 4"),
        ({"weight": 1.5}, "weight is 1.5"),
        ({"depth": 1.0}, "depth is 1.0; it must be a whole number"),
    ],
)
def test_numbers_out_of_range_are_refused(numbers, message):
    with pytest.raises(UserError, match=message):
        Reranking(**numbers)
