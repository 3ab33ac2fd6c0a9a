"""Scores of refined searches against scores of their lists of results."""

import numpy as np
import pytest

from hypjax.geometry import PoincareBall, Sphere
from hypjax.retrieval import nearest_neighbors, neighbors, query_scores
from hypjax.retrieval.expansion import expand_queries
from hypjax.retrieval.refinement import Refinement
from hypjax.retrieval.reranking import Reranking, rerank
from tests.helpers.galleries import labelled
from tests.retrieval.test_metrics import by_definition

METRICS = ("recall@1", "recall@20", "precision@5", "mrr", "map", "map@r", "r_precision")
NUMBERS = Reranking(k1=8, k2=3, depth=10)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("refinement", "separate"),
    [
        (Refinement(3, 1.0), False),
        (Refinement(2, 0.0, NUMBERS), False),
        (Refinement(0, 0.0, NUMBERS), True),
    ],
    ids=["expanded", "both", "re-ranked"],
)
def test_scores_are_those_of_the_lists(refinement, separate):
    space = PoincareBall(0.1, 2.3)
    gallery, labels = labelled(space, 150, 12, noise=0.8)
    queries, query_labels = (
        labelled(space, 150, 12, noise=0.8, seed=1) if separate else (gallery, labels)
    )
    own_ids = None if separate else np.arange(150)
    asked = queries
    if refinement.expansion:
        k, alpha = refinement.expansion, refinement.alpha
        asked = expand_queries(queries, gallery, k=k, alpha=alpha, space=space, own_ids=own_ids)
    _, ids = neighbors.search(asked, own_ids, gallery, k=150 - (not separate), space=space)
    if refinement.reranking:
        _, first = rerank(asked, gallery, space=space, own_ids=own_ids, numbers=NUMBERS)
        ids[:, :10] = first
    hits = labels[ids] == query_labels[:, None]
    searched = (gallery, labels) if separate else ()
    got = query_scores(
        *(queries, query_labels, *searched), metrics=METRICS, space=space, refinement=refinement
    )
    for name in METRICS:
        expected = [by_definition(name, row, row.sum()) for row in hits]
        np.testing.assert_allclose(got[name], expected, atol=1e-12, err_msg=name)


def test_a_search_re_ranks_at_least_as_many_as_it_returns():
    x, _ = labelled(Sphere(), 60, 12, noise=0.8, seed=3)
    own_ids = np.arange(60)
    distances, ids = Refinement(reranking=NUMBERS).search(x, own_ids, x, k=20, space=Sphere())
    whole = rerank(x, space=Sphere(), numbers=Reranking(k1=8, k2=3, depth=20))
    np.testing.assert_array_equal(ids, whole[1])
    np.testing.assert_array_equal(distances, whole[0])
    unrefined = Refinement().search(x, own_ids, x, k=20, space=Sphere())
    plain = nearest_neighbors(x, x, k=20, space=Sphere(), exclude_self=True)
    np.testing.assert_array_equal(unrefined[1], plain[1])
