"""Galleries in a tree or a graph."""

import builtins
import dataclasses
import os
import pathlib
import shutil
import sys

import numpy as np
import pytest

from hypjax.errors import UserError
from hypjax.galleries.embeddings import open_gallery
from hypjax.geometry import Fused, Lorentz, PoincareBall, Sphere
from hypjax.retrieval.neighbors import search
from tests.helpers import galleries
from tests.helpers.galleries import check_neighbours, clusters, embeddings, found_in
from tests.helpers.manual import program_with

pytest.importorskip("usearch.index", reason="needs the ann extra: usearch")
pytest.importorskip("numba", reason="needs the ann extra: numba")
from benchmarks import ann as benchmark  # noqa: E402
from hypjax.integrations import ann  # noqa: E402
from hypjax.integrations.ann import IndexedGallery, export_ann  # noqa: E402

SPACES = [Sphere(), PoincareBall(1.0, None), PoincareBall(0.0, None), Lorentz(0.1, 2.3)]
BALL = PoincareBall(0.1, 2.3)


@pytest.fixture
def graphs(monkeypatch):
    """Leaves no gallery to a tree."""
    monkeypatch.setattr(ann, "_TREE_SEPARATIONS", 0)


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_a_graph_finds_the_exact_neighbours_and_their_distances(space, tmp_path, graphs):
    points = clusters(space, 3000)
    path = tmp_path / "gallery.ann"
    said = export_ann(embeddings(points, space), path)
    gallery = open_gallery(path)
    assert gallery.recall >= 0.98 and f"{gallery.recall:.1%}" in said
    assert gallery.index.dtype.name == "BF16"
    own, queries = np.arange(1000), points[:1000]
    check_neighbours(found_in(gallery, queries, 10, own), queries, points, space, 0.98, own)


@pytest.mark.parametrize(("c", "dim"), [(0.1, 64), (1.0, 8)])
def test_trees_are_searched_up_to_the_boundary(c, dim, graphs):
    ball, points = PoincareBall(c, None), galleries.tree(c, dim)
    assert np.sqrt(c) * np.linalg.norm(points, axis=1).max() > 0.99
    gallery = IndexedGallery.build(embeddings(points, ball))
    assert gallery.recall >= 0.98
    assert gallery.index.dtype.name == "F32"  # Rounding would be too coarse.
    queries = points[-500:]
    check_neighbours(found_in(gallery, queries, 5), queries, points, ball, 0.98)


def test_the_promise_holds_where_images_have_copies(tmp_path, graphs):
    points = clusters(BALL, 1200, dim=16).copy()
    points, queries = points[:1000], points[1000:]
    points[np.random.default_rng(0).permutation(1000)[:300]] = points[0]  # As a placeholder has.
    points[800:] = points[:200]
    export_ann(embeddings(points, BALL), tmp_path / "gallery.ann")
    gallery = open_gallery(tmp_path / "gallery.ann")
    assert gallery.recall >= 0.98 and len(gallery.index) == len(np.unique(points, axis=0))
    for k in (10, 400):
        check_neighbours(found_in(gallery, queries, k), queries, points, BALL, gallery.recall)


@pytest.mark.parametrize("space", [Sphere(), PoincareBall(0.0, None), BALL], ids=str)
def test_a_point_that_is_near_to_all_others_hides_none(space, graphs):
    """On a sphere, the mean is nearer to each point than most others are."""
    directions = np.random.default_rng(0).normal(0.5, 1, size=(1500, 24))
    directions *= 2 / np.linalg.norm(directions, axis=1, keepdims=True)
    near = directions.mean(axis=0) + np.linspace(0, 1e-3, 24)
    roots = [0 * near if space.ball() else -near, directions.mean(axis=0), near]
    points = np.asarray(space.embed(np.float32([*roots, *directions])))
    points, queries = points[:1000], points[1000:]
    gallery = IndexedGallery.build(embeddings(points, space))
    assert gallery.recall >= 0.98 and gallery.stray.mean() <= 0.05
    for k in (1, 10):
        check_neighbours(found_in(gallery, queries, k), queries, points, space, 0.98)
    assert (found_in(gallery, points, 1)[1][:, 0] == np.arange(1000)).mean() >= 0.98


@pytest.mark.parametrize("kind", ["tree", "graph"])
def test_all_copies_of_an_image_are_found(monkeypatch, kind):
    monkeypatch.setattr(ann, "_TREE_SEPARATIONS", 1500 if kind == "tree" else 0)
    distinct = clusters(BALL, 40)
    gallery = IndexedGallery.build(embeddings(np.repeat(distinct, 50, axis=0), BALL))
    expected = np.arange(2000).reshape(40, 50)
    np.testing.assert_array_equal(found_in(gallery, distinct, 50)[1], expected)
    own = expected[:, 7]
    others = np.delete(expected, 7, axis=1)
    np.testing.assert_array_equal(found_in(gallery, distinct, 49, own)[1], others)


def test_wrong_points_are_refused():
    points = clusters(BALL, 60)
    gallery = IndexedGallery.build(embeddings(points, BALL))
    galleries.check_wrong_points_are_refused(gallery, points[:9], BALL)
    fused = Fused(((Sphere(), 1.0), (BALL, 1.0)))
    with pytest.raises(UserError, match="there is no approximate search in"):
        IndexedGallery.build(embeddings(fused.embed(np.ones((5, 8))), fused))


def test_all_images_find_themselves_among_64_candidates(monkeypatch, tmp_path, graphs):
    """No links of so sparse a graph lead to some of them."""
    monkeypatch.setattr("hypjax.integrations.ann._DENSE", (12, 48))
    ball, path = PoincareBall(1.0, None), tmp_path / "gallery.ann"
    points = np.asarray(ball.embed(benchmark._features(1500, 128)))
    gallery = IndexedGallery.build(embeddings(points, ball))
    assert gallery.stray.mean() > 0.005 and gallery.recall >= 0.98
    gallery.save(path)
    opened = IndexedGallery.open(path)
    opened.candidates = 64
    assert (found_in(opened, points, 1)[1][:, 0] == np.arange(1500)).all()


@pytest.mark.parametrize("space", [PoincareBall(1.0, None), Lorentz(1.0, None)], ids=str)
@pytest.mark.parametrize("count", [1, 2, 400])
def test_a_tree_finds_all_but_own_images_also_in_a_class(space, count, tmp_path):
    points = np.asarray(space.from_ball(galleries.tree(1.0, 4)[-count:]))
    assert "exact" in export_ann(embeddings(points, space), tmp_path / "gallery.ann")
    gallery = open_gallery(tmp_path / "gallery.ann")
    assert gallery.recall == 1
    check_neighbours(found_in(gallery, points, count), points, points, space, 1)
    assert [gallery.has_class(name) for name in ("odd", "even", "none")] == [True, count > 1, False]
    own = np.arange(count)
    if count > 1:
        others = found_in(gallery, points, count - 1, own)
        check_neighbours(others, points, points, space, 1, own)
    paths = [os.path.realpath(f"{i}.png") for i in own]
    hits = gallery.nearest(points, count, paths, label="odd")
    expected = search(points, None, points[::2], k=len(points[::2]), space=space)[1] * 2
    for i, (of_query, rows) in enumerate(zip(hits, expected, strict=True)):
        assert of_query.ids == [f"{row}.png" for row in rows if row != i]


@pytest.mark.parametrize("kind", ["tree", "graph"])
def test_a_damaged_gallery_is_refused(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(ann, "_TREE_SEPARATIONS", 1500 if kind == "tree" else 0)
    path = tmp_path / "gallery.ann"
    with pytest.raises(UserError, match="does not exist"):
        open_gallery(path)
    export_ann(embeddings(clusters(BALL, 60), BALL), path)
    for file in filter(pathlib.Path.is_file, path.rglob("*")):
        content = file.read_bytes()
        file.write_bytes(content[:-50])  # usearch itself crashes on such files.
        with pytest.raises(UserError, match="damaged"):
            open_gallery(path)
        file.write_bytes(content)
    for file in path.glob("*/*"):  # As in a gallery without folders of exports.
        file.rename(path / file.name)
    with pytest.raises(UserError, match="export the gallery again"):
        open_gallery(path)
    export_ann(embeddings(clusters(BALL, 60), BALL), path)
    assert len(open_gallery(path)) == 60


def test_a_reader_of_a_gallery_that_is_replaced_has_the_old_or_the_new(
    tmp_path, monkeypatch, graphs
):
    path, create = tmp_path / "gallery.ann", ann._create_index
    made = [embeddings(clusters(BALL, n, seed=n), BALL, first=n) for n in (60, 80)]
    built = [IndexedGallery.build(gallery) for gallery in made]
    for before, after in (built, built[::-1]):
        before.save(path)

        def replaced(*args, after=after, **options):
            after.save(path)
            return create(*args, **options)

        monkeypatch.setattr(ann, "_create_index", replaced)
        opened = IndexedGallery.open(path)
        assert opened.ids.tolist() == after.ids.tolist()
        distances, items = found_in(opened, after.vectors, 3)
        found = distances, items - len(after)
        check_neighbours(found, after.vectors, after.vectors, BALL, 1)
    assert [file.name for file in tmp_path.iterdir()] == ["gallery.ann"]
    assert len([*path.iterdir()]) == 2  # Facts, and the files of one export.


def states_during(call, folder, into):
    """What a kill may leave of a folder: a copy of each state between calls of C functions."""
    copies, last = [], None

    def keep_state(frame, event, function):
        nonlocal last
        owner = getattr(function, "__self__", None)  # Most calls, which change no file, are fast.
        if not event.startswith("c_") or owner is builtins or isinstance(owner, str | list | dict):
            return
        files = [entry for root, *_ in os.walk(folder) for entry in os.scandir(root)]
        state = sorted((x.path, x.inode(), x.stat().st_size) for x in files)
        if state != last and folder.exists():
            copies.append(into / f"{len(copies)}.ann")
            shutil.copytree(folder, copies[-1])
        last = state

    sys.setprofile(keep_state)
    try:
        call()
    finally:
        sys.setprofile(None)
    return copies


@pytest.mark.parametrize("kinds", ["tree graph", "graph tree", "graph graph"])
def test_a_kill_leaves_the_old_or_the_new_gallery(kinds, tmp_path, monkeypatch):
    made = []
    for kind, count in zip(kinds.split(), (60, 80), strict=True):
        monkeypatch.setattr(ann, "_TREE_SEPARATIONS", 1500 if kind == "tree" else 0)
        points = clusters(BALL, count, seed=count)
        made.append(IndexedGallery.build(embeddings(points, BALL, first=count)))
    path = tmp_path / "gallery.ann"
    made[0].save(path)
    states = states_during(lambda: made[1].save(path), path, tmp_path)
    opened = [IndexedGallery.open(state) for state in states]
    is_new = [len(gallery) == len(made[1]) for gallery in opened]
    assert sorted(is_new) == is_new and not is_new[2] and is_new[-2]
    for new, gallery in zip(is_new, opened, strict=True):
        np.testing.assert_array_equal(gallery.vectors, made[new].vectors)
        assert gallery.ids.tolist() == made[new].ids.tolist()
        assert type(gallery.index) is type(made[new].index)
        assert (gallery.search_rows(gallery.vectors, 1)[1][:, 0] == np.arange(len(gallery))).all()
    for state in states:  # What was left is used or removed.
        made[0].save(state)
        assert len(IndexedGallery.open(state)) == 60 and len([*state.iterdir()]) == 2


def test_a_kill_in_the_first_export_leaves_a_gallery_or_none(tmp_path):
    path, gallery = (
        tmp_path / "gallery.ann",
        IndexedGallery.build(embeddings(clusters(BALL, 60), BALL)),
    )
    gallery.save(tmp_path / "imported.ann")  # Imports what would be recorded.
    states = states_during(lambda: gallery.save(path), path, tmp_path)
    assert not (states[-3] / "gallery.json").exists()
    for state in states:
        if (state / "gallery.json").exists():
            assert len(IndexedGallery.open(state)) == 60
        else:
            with pytest.raises(UserError, match="export the gallery again"):
                open_gallery(state)


def test_the_documented_lines_need_no_hypjax(tmp_path, monkeypatch, capsys, graphs):
    points = clusters(BALL, 500, dim=128).copy()
    points[[9, 40]] = points[0]
    export_ann(embeddings(points, BALL), tmp_path / "gallery.ann")
    monkeypatch.chdir(tmp_path)
    program = program_with("engines.md", "index.view")
    assert "hypjax" not in program.replace("hypjax embed", "")
    exec(program, {})
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    distances, found = search(points[:1], None, points, k=10, space=BALL)
    assert [name for _, name in printed] == [f"{i}.png" for i in found[0]]
    np.testing.assert_allclose([float(d) for d, _ in printed], distances[0], atol=1e-3)


def test_galleries_keep_that_they_hold_texts(tmp_path, monkeypatch):
    texts = dataclasses.replace(embeddings(clusters(BALL, 200, dim=8), BALL), noun="text")
    for name, separations in (("tree.ann", ann._TREE_SEPARATIONS), ("graph.ann", 0)):
        monkeypatch.setattr(ann, "_TREE_SEPARATIONS", separations)
        export_ann(texts, tmp_path / name)
        assert open_gallery(tmp_path / name).noun == "text"
