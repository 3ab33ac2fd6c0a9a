"""Query expansion, re-ranking and both, against loops over the queries."""

import jax
import numpy as np
import pytest

from hypjax.errors import UserError
from hypjax.geometry import PoincareBall, Sphere, poincare
from hypjax.retrieval import nearest_neighbors, neighbors, query_scores
from hypjax.retrieval import postprocessing as module
from hypjax.retrieval.postprocessing import Postprocessing, Reranking, expand_queries, rerank
from tests.helpers.galleries import labelled, points

SPHERE, BALL = Sphere(), PoincareBall(0.1, 2.3)
_distances = jax.jit(lambda space, x, y: space.distance(x[:, None], y))


def looped(space, queries, gallery, own_ids, k, alpha):
    """Means over sorted distances, in float64."""
    points, weights = [], []
    distances = np.asarray(_distances(space, np.float64(queries), np.float64(gallery)))
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


@pytest.mark.parametrize("space", [SPHERE, PoincareBall(0.3, 2.0)], ids=str)
@pytest.mark.parametrize("alpha", [0.0, 3.0])
def test_expansion_equals_a_loop(space, alpha, monkeypatch):
    monkeypatch.setattr(module, "_BLOCK_BYTES", 6400)
    queries, gallery = points(space, 0, 40), points(space, 1, 40)
    gallery[3] = queries[2]
    of_some, itself = np.where(np.arange(40) == 2, 3, -1), np.arange(40)
    for x, own_ids in [(queries, None), (queries, of_some), (gallery, itself)]:
        with jax.enable_x64(True):
            ids = np.full(40, -1) if own_ids is None else own_ids
            expected = looped(space, x, gallery, ids, 7, alpha)
        actual = expand_queries(x, gallery, k=7, alpha=alpha, space=space, own_ids=own_ids)
        assert actual.dtype == np.float32
        np.testing.assert_allclose(actual, expected, atol=3e-7)


def test_dissimilar_items_count_only_in_averages():
    queries = np.array([[1, 0]], np.float32)
    gallery = np.array([[0, 1], [-0.6, -0.8]], np.float32)
    weighted = expand_queries(queries, gallery, k=2, alpha=1.0, space=SPHERE)
    np.testing.assert_allclose(weighted, queries, atol=1e-7)
    average = expand_queries(queries, gallery, k=2, space=SPHERE)
    np.testing.assert_allclose(average, [np.array([0.4, 0.2]) / np.sqrt(0.2)], atol=1e-6)


def distances_of(space, points):
    with jax.enable_x64(True):
        x = np.asarray(points, np.float64)
        return np.asarray(_distances(space, x, x))


def transcription(d, k1, k2, weight):
    """Re-ranking by Eq. 3 to 12 for all pairs of items with the distances d, by loops."""
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
    [(BALL, (20, 6, 0.3, 30)), (SPHERE, (7, 1, 0.0, 119)), (BALL, (1, 2, 0.5, 5))],
    ids=str,
)
def test_equals_the_equations_where_each_item_is_a_query(space, numbers):
    x, _ = labelled(space, 120, 8, noise=0.6)
    _, first = nearest_neighbors(x, x, k=numbers[3], space=space, exclude_self=True)
    final = transcription(distances_of(space, x), *numbers[:3])
    actual, ids = rerank(x, x, own_ids=np.arange(120), space=space, parameters=Reranking(*numbers))
    np.testing.assert_array_equal(ids, sorted_within(first, final))
    np.testing.assert_allclose(actual, np.take_along_axis(final, ids, 1), rtol=1e-5, atol=1e-6)
    assert not (ids == np.arange(120)[:, None]).any()


PARAMETERS = Reranking(k1=8, k2=3, depth=10)


def test_a_search_re_ranks_at_least_as_many_as_it_returns():
    x, _ = labelled(SPHERE, 60, 12, noise=0.8, seed=3)
    own_ids = np.arange(60)
    distances, ids = Postprocessing(reranking=PARAMETERS).search(x, own_ids, x, k=20, space=SPHERE)
    parameters = Reranking(k1=8, k2=3, depth=20)
    expected = rerank(x, x, own_ids=own_ids, space=SPHERE, parameters=parameters)
    np.testing.assert_array_equal(ids, expected[1])
    np.testing.assert_array_equal(distances, expected[0])


def test_numbers_out_of_range_are_refused():
    five = points(SPHERE, 0, 5)
    for numbers, keyword in [
        ({"k": 5, "alpha": -1.0}, "alpha"),
        ({"k": 5, "own_ids": np.arange(5)}, "k is 5, but a search finds only 4"),
        ({"k": 1, "own_ids": np.array([99, 0, 0, 0, 0])}, "own_ids"),
    ]:
        with pytest.raises(UserError, match=keyword):
            expand_queries(five, five, space=SPHERE, **numbers)


def test_queries_outside_the_gallery_are_compared_with_its_items(monkeypatch):
    monkeypatch.setattr(module, "_PAIR_BYTES", 16 * 6 * 20)  # Several parts of 20 pairs.
    gallery, outside = (labelled(BALL, n, 4, noise=0.6, seed=n)[0] for n in (24, 6))
    final = transcription(distances_of(BALL, np.concatenate([gallery, outside])), 5, 2, 0.3)
    _, first = nearest_neighbors(outside, gallery, k=10, space=BALL)
    actual, ids = rerank(outside, gallery, space=BALL, parameters=Reranking(5, 2, 0.3, 10))
    np.testing.assert_array_equal(ids, sorted_within(first, final[24:, :24]))
    np.testing.assert_allclose(actual, np.take_along_axis(final[24:], ids, 1), rtol=1e-5, atol=1e-6)


def test_the_first_match_counts_where_it_is_after_re_ranking():
    x, labels = labelled(BALL, 60, 6, noise=0.8)
    _, ids = neighbors.search(x, np.arange(60), x, k=59, space=BALL)
    ids[:, :10] = rerank(x, x, own_ids=np.arange(60), space=BALL, parameters=PARAMETERS)[1]
    hits = labels[ids] == labels[:, None]
    actual = query_scores(
        x, labels, metrics=("mrr",), space=BALL, postprocessing=Postprocessing(reranking=PARAMETERS)
    )
    np.testing.assert_allclose(actual["mrr"], 1 / (1 + hits.argmax(axis=1)), rtol=1e-12)
