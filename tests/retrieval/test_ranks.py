"""Ranks and Recall@K in cases that naive counting gets wrong; see also test_exactness.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hypjax.errors import UserError
from hypjax.geometry import PoincareBall, Sphere
from hypjax.retrieval import inputs, match_ranks, ranks, recall_at_k, tiles
from tests.helpers.exact_order import FUSED, true_order, true_ranks
from tests.helpers.galleries import points


def test_ranks_mark_queries_without_a_match():
    x, labels = points(Sphere(), 0, 300, 4), np.random.default_rng(1).integers(0, 5, 300)
    labels[7] = 9
    separate = match_ranks(x, labels, x, np.where(labels == 3, 2, labels), space=Sphere())
    np.testing.assert_array_equal(separate == ranks.NO_MATCH, labels == 3)
    np.testing.assert_array_equal(
        np.flatnonzero(match_ranks(x, labels, space=Sphere()) == ranks.NO_MATCH), [7]
    )


def test_what_cannot_be_ranked_is_an_error():
    for arguments, message in [
        ((np.eye(3) / 2, [0, 1, 2]), "no query has a match"),
        ((np.eye(3) * (1 - 1e-9), [0, 0, 0]), "outside the ball"),
        ((np.eye(3) / 2, [0, 0]), "queries need 3 whole numbers"),
        ((np.eye(3), [0, 0, 0], np.eye(3)), "gallery need 3 whole numbers"),
    ]:
        with pytest.raises(UserError, match=message):
            recall_at_k(*arguments, ks=(1,), space=PoincareBall(1.0))


def test_points_may_be_of_half_precision():
    x, labels = jnp.asarray(points(PoincareBall(), 0, 60, 4), jnp.bfloat16), np.arange(60) % 9
    expected = match_ranks(np.asarray(x, np.float32), labels, space=PoincareBall())
    np.testing.assert_array_equal(match_ranks(x, labels, space=PoincareBall()), expected)


@pytest.mark.parametrize("space", [Sphere(), pytest.param(FUSED, marks=pytest.mark.slow)], ids=str)
def test_equals_brute_force_over_many_tiles_and_chunks(space, monkeypatch, tmp_path):
    monkeypatch.setattr(tiles, "SIDE", 64)
    jax.clear_caches()
    x = points(space, 0, 300, 8)
    x[100:160] = x[:60]
    labels = np.repeat(np.arange(60), np.random.default_rng(0).integers(1, 22, 60))[:300]
    labels = np.random.default_rng(1).permutation(np.pad(labels, (0, 300 - len(labels))))
    order = true_order(space, x, x)
    expected = true_ranks(order, labels, labels, exclude_self=True)
    np.save(tmp_path / "x.npy", x)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    one_tile = 2 * 4 * x.shape[1] * 64
    for limit, array in ((tiles._FACTOR_BYTES, x), (one_tile, mapped), (2 * one_tile, mapped)):
        monkeypatch.setattr(tiles, "_FACTOR_BYTES", limit)
        np.testing.assert_array_equal(match_ranks(array, labels, space=space), expected)
    own_ids = np.arange(40, 140)
    separate = mapped[40:140], labels[40:140], mapped, labels
    asked, searched = inputs.labelled(*separate)
    got = ranks.first_ranks(asked._replace(ids=own_ids), searched, space, None)
    np.testing.assert_array_equal(got, expected[40:140])
    got = match_ranks(*separate, space=space)
    without = true_ranks(order[40:140], labels[40:140], labels, exclude_self=False)
    np.testing.assert_array_equal(got, without)
    jax.clear_caches()
