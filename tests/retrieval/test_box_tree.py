"""Searches in a tree of boxes and gaps."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hypjax.errors import UserError
from hypjax.geometry import Lorentz, PoincareBall
from hypjax.retrieval import nearest_neighbors, query_scores, selection
from hypjax.retrieval.neighbors import search
from hypjax.retrieval.selection import StreamedGallery
from tests.helpers import galleries

pytest.importorskip("numba", reason="needs the ann extra: numba")
from hypjax.retrieval.box_tree import BoxTree  # noqa: E402


def separations(space, queries, points):
    """All separations, by the space's own formula in float64."""
    with jax.enable_x64(True):
        x, y = (np.asarray(z, np.float64) for z in (queries, points))
        return np.asarray(space.separation(x[:, None], y[None]))


@settings(deadline=None, max_examples=60)
@given(
    c=st.sampled_from([1e-3, 0.1, 1.0, 10.0]),
    is_ball=st.booleans(),
    count=st.integers(1, 150),
    dim=st.integers(1, 12),
    depth=st.floats(0, 6),
    kind=st.sampled_from(["scattered", "copies", "one line"]),
    share=st.floats(0, 1),
    seed=st.integers(0, 2**16),
)
def test_results_are_those_of_measuring_all_points(
    c, is_ball, count, dim, depth, kind, share, seed
):
    """With gaps down to 1e-6, copies, points of one line, and all points as neighbours."""
    rng = np.random.default_rng(seed)
    directions = rng.normal(size=(count, dim))
    if kind == "one line":
        directions = np.where(rng.random((count, 1)) < 0.5, 1, -1) * directions[:1]
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    deepest = depth if is_ball else min(depth, 5.5)  # Hyperboloids end at cosh = 1e6.
    norms = np.sqrt(1 - 10.0 ** -rng.uniform(0, deepest, (count, 1)))
    points = directions * norms * (1 - 1e-7) / np.sqrt(c)
    if kind == "copies":
        points = points[rng.integers(0, count, count)]
    space = PoincareBall(c, None) if is_ball else Lorentz(c, None)
    points = points.astype(np.float32)
    if not is_ball:
        with jax.enable_x64(True):
            points = np.asarray(space.from_ball(points.astype(np.float64)), np.float32)
    k = 1 + int(share * (count - 1))
    gallery = StreamedGallery(points, tree=BoxTree.build(points, space))
    distances, rows = search(points, None, gallery, k=k, space=space)
    expected = separations(space, points, points)
    # Formulas differ by roundings, which gaps near the boundary magnify.
    found = np.take_along_axis(expected, rows, axis=1)
    np.testing.assert_allclose(found, np.sort(expected, axis=1)[:, :k], rtol=1e-8, atol=0)
    with jax.enable_x64(True):
        true_distances = np.asarray(space.distance_at(found))
    np.testing.assert_allclose(distances, true_distances, rtol=1e-6)
    tied = (np.diff(found, axis=1) == 0) & (points[rows[:, 1:]] == points[rows[:, :-1]]).all(axis=2)
    assert (np.diff(rows, axis=1)[tied] > 0).all()
    assert all(len(set(of_query)) == k for of_query in rows.tolist())


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("space", [PoincareBall(1.0, None), Lorentz(1.0, None)], ids=str)
def test_mapped_points_find_all_others_but_their_own(tmp_path, space, dtype):
    """Coordinates in float64 stand for their roundings to float32, as in all searches."""
    with jax.enable_x64(True):
        points = np.asarray(space.from_ball(np.float64(galleries.tree(1.0, 8)[-300:])))
    points = (points * (1 + 1e-9)).astype(dtype)
    np.save(tmp_path / "points.npy", points)
    mapped = np.load(tmp_path / "points.npy", mmap_mode="r")
    gallery = StreamedGallery(mapped, tree=BoxTree.build(mapped, space))
    own = np.where(np.arange(300) % 2, np.arange(300), -1)
    distances, rows = search(mapped, own, gallery, k=299, space=space)
    expected = separations(space, points.astype(np.float32), points.astype(np.float32)).copy()
    expected[1::2][np.arange(150), own[1::2]] = np.inf
    found = np.take_along_axis(expected, rows, axis=1)
    np.testing.assert_allclose(found, np.sort(expected, axis=1)[:, :299], rtol=1e-8)
    with jax.enable_x64(True):
        np.testing.assert_allclose(distances, space.distance_at(found), rtol=1e-6)


@pytest.fixture
def near_boundary(monkeypatch):
    """Points of a random tree, of which even few searches are worth a tree of boxes."""
    monkeypatch.setattr(selection, "_TREE_PAIRS", 0)
    return galleries.tree(1.0, 8)


def without_tree(monkeypatch, call):
    with monkeypatch.context() as patch:
        patch.setattr(selection, "can_search", lambda: False)
        return call()


@pytest.mark.parametrize("exclude_self", [False, True])
def test_searches_near_the_boundary_take_the_tree_and_find_the_same(
    near_boundary, monkeypatch, exclude_self
):
    ball = PoincareBall(1.0, None)
    options = dict(k=7, space=ball, exclude_self=exclude_self)
    assert StreamedGallery(near_boundary).tree(ball, near_boundary, 8) is not None
    found = nearest_neighbors(near_boundary, near_boundary, **options)
    assert found[0].dtype == np.float32 and found[1].dtype == np.int32
    expected = without_tree(
        monkeypatch, lambda: nearest_neighbors(near_boundary, near_boundary, **options)
    )
    np.testing.assert_array_equal(found[1], expected[1])
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-6)


@pytest.mark.parametrize("with_gallery", [False, True])
def test_scores_near_the_boundary_are_those_without_a_tree(
    near_boundary, monkeypatch, with_gallery
):
    labels = np.arange(len(near_boundary)) // 7
    arguments = (near_boundary[::3], labels[::3], near_boundary, labels)
    arguments = arguments if with_gallery else (near_boundary, labels)
    names = ["recall@1", "recall@10", "r_precision", "map@r", "mrr"]

    def score():
        return query_scores(*arguments, metrics=names, space=PoincareBall(1.0, None))

    found, expected = score(), without_tree(monkeypatch, score)
    for name in names:
        np.testing.assert_array_equal(found[name], expected[name])
    alone = query_scores(*arguments, metrics=["recall@10"], space=PoincareBall(1.0, None))
    np.testing.assert_array_equal(alone["recall@10"], expected["recall@10"])


def test_points_that_no_box_separates_are_left_to_products(near_boundary):
    ball = PoincareBall(0.1, 2.3)
    points = galleries.clusters(ball, 2000, dim=64)
    assert StreamedGallery(points).tree(ball, points, 10) is None
    assert StreamedGallery(near_boundary).tree(PoincareBall(1.0, None), near_boundary, 4000) is None


def test_few_separations_answer_a_query_near_the_boundary(near_boundary):
    tree = BoxTree.build(near_boundary, PoincareBall(1.0, None))
    assert tree.cost(near_boundary, 10) < len(near_boundary) / 4


def test_wrong_arguments_are_refused_as_without_a_tree(near_boundary):
    ball = PoincareBall(1.0, None)
    gallery = StreamedGallery(near_boundary, tree=BoxTree.build(near_boundary, ball))
    with pytest.raises(UserError, match="queries have 7 coordinates, the gallery 8"):
        search(near_boundary[:3, :7], None, gallery, k=2, space=ball)
    wrong = np.full((2, 8), np.nan, np.float32)
    with pytest.raises(UserError, match="embedding 0 is not finite"):
        search(wrong, None, gallery, k=2, space=ball)


@pytest.mark.parametrize("error", [OSError, EOFError])
def test_programs_that_cannot_be_kept_are_compiled_in_memory(near_boundary, monkeypatch, error):
    from hypjax.retrieval import box_search

    def unwritable(*_):
        raise error("a full disk")

    ball = PoincareBall(1.0, None)
    tree = BoxTree.build(near_boundary, ball)
    expected = tree.search(near_boundary[:5], 3)[0][1]
    compiled, calls = box_search.search, []
    monkeypatch.setattr(box_search, "search", lambda *a: calls.append(a) or unwritable())
    monkeypatch.setattr(
        box_search, "keep_none", lambda: monkeypatch.setattr(box_search, "search", compiled)
    )
    np.testing.assert_array_equal(tree.search(near_boundary[:5], 3)[0][1], expected)
    assert len(calls) == 1
