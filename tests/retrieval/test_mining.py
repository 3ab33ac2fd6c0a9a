"""Mining against the released procedure: down the ranking, one image of each class."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hypjax.errors import UserError
from hypjax.geometry import PoincareBall, Sphere
from hypjax.retrieval.mining import hardest_negatives

SPACES = {"sphere": Sphere(), "ball": PoincareBall(c=1.0)}


def by_ranking(space, anchor, label, pool, labels, count):
    """Walks down the ranking and takes at most one image of each other class."""
    order = np.argsort(np.asarray(space.distance(anchor, pool)), kind="stable")
    used, found = {label}, []
    for item in order:
        if labels[item] not in used:
            found.append(item)
            used.add(labels[item])
    return found[:count]


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**31), name=st.sampled_from(sorted(SPACES)), count=st.integers(1, 4))
def test_negatives_are_the_hardest_under_the_rule(seed, name, count):
    space, rng = SPACES[name], np.random.default_rng(seed)
    anchors, pool = (
        np.asarray(space.embed(rng.normal(size=(n, 6)).astype(np.float32))) for n in (9, 40)
    )
    own, labels = rng.integers(0, 8, 9), np.concatenate([np.arange(8), rng.integers(0, 8, 32)])
    found = hardest_negatives(anchors, own, pool, labels, count=count, space=space)
    for row, anchor, label in zip(found, anchors, own, strict=True):
        assert row.tolist() == by_ranking(space, anchor, label, pool, labels, count)


def test_many_anchors_are_mined_in_blocks():
    space, rng = Sphere(), np.random.default_rng(0)
    anchors = np.asarray(space.embed(rng.normal(size=(600, 4)).astype(np.float32)))
    own, labels = rng.integers(0, 9, 600), np.arange(50) % 9
    found = hardest_negatives(anchors, own, anchors[:50], labels, count=3, space=space)
    for i in (0, 255, 256, 599):
        expected = by_ranking(space, anchors[i], own[i], anchors[:50], labels, 3)
        assert found[i].tolist() == expected


def test_too_few_classes_are_refused():
    points = np.eye(4, dtype=np.float32)
    labels = np.array([0, 0, 1, 2])
    with pytest.raises(UserError, match="3 negatives of other classes .* has images of 2"):
        hardest_negatives(points, labels, points, labels, count=3, space=Sphere())
    found = hardest_negatives(points[:1], np.array([7]), points, labels, count=3, space=Sphere())
    assert sorted(labels[found[0]]) == [0, 1, 2]
