"""Galleries in a graph of usearch."""

import errno
import functools
import json
import os
import pathlib
import shutil

import numpy as np
import pytest

from benchmarks import ann
from benchmarks.measure import Options
from hypjax.errors import UserError
from hypjax.geometry import Fused, Lorentz, PoincareBall, Sphere
from hypjax.integrations import usearch as graph
from hypjax.integrations.usearch import GraphGallery, export_usearch
from hypjax.retrieval.gallery_files import open_gallery
from hypjax.retrieval.neighbors import search
from tests.helpers.galleries import (
    check_neighbours,
    check_wrong_points_are_refused,
    clusters,
    embeddings,
    found_in,
    tree,
)
from tests.helpers.small_runs import REPOSITORY

index = pytest.importorskip("usearch.index", reason="needs the ann extra: usearch")
pytest.importorskip("numba", reason="needs the ann extra: numba")
SPACES = [Sphere(), PoincareBall(0.1, 2.3), PoincareBall(1.0, None), PoincareBall(0.0, None)]
SPACES += [Lorentz(0.1, 2.3)]


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    """Threads that add points at once link them in another order each time."""
    monkeypatch.setattr(index.Index, "add", functools.partialmethod(index.Index.add, threads=1))


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_it_finds_the_exact_neighbours_and_their_distances(space, tmp_path):
    points = clusters(space, 3000)
    path = tmp_path / "gallery.usearch"
    said = export_usearch(embeddings(points, space), path)
    gallery = open_gallery(path)
    assert gallery.recall >= 0.98 and f"{gallery.recall:.1%}" in said
    assert gallery._index.dtype.name == "BF16"
    own, queries = np.arange(1000), points[:1000]
    check_neighbours(found_in(gallery, queries, 10, own), queries, points, space, 0.98, own)


@pytest.mark.parametrize(("c", "dim"), [(0.1, 64), (1.0, 8)])
def test_trees_are_searched_up_to_the_boundary(c, dim):
    ball, points = PoincareBall(c, None), tree(c, dim)
    assert np.sqrt(c) * np.linalg.norm(points, axis=1).max() > 0.99
    gallery = GraphGallery.build(embeddings(points, ball))
    assert gallery.recall >= 0.98
    assert gallery._index.dtype.name == "F32"  # Rounding would be too coarse.
    queries = points[-500:]
    check_neighbours(found_in(gallery, queries, 5), queries, points, ball, 0.98)


@pytest.mark.parametrize(("count", "dim"), [(1, 8), (2, 32), (15, 8)])
def test_few_images_and_few_queries_are_searched(count, dim, tmp_path):
    ball, path = SPACES[1], tmp_path / "gallery.usearch"
    points = clusters(ball, count, dim=dim)
    export_usearch(embeddings(points, ball), path)
    gallery = open_gallery(path)
    assert gallery.recall == 1
    assert found_in(gallery, points[:0], count)[1].shape == (0, count)
    for queries in (points[:1], points):
        check_neighbours(found_in(gallery, queries, count), queries, points, ball, 1.0)
        if count > 1:
            own = np.arange(len(queries))
            check_neighbours(found_in(gallery, queries, 1, own), queries, points, ball, 1.0, own)


def test_images_are_added_found_removed_and_gone(tmp_path):
    space = SPACES[1]
    points = clusters(space, 400)
    path = tmp_path / "gallery.usearch"
    GraphGallery.build(embeddings(points[:300], space)).save(path)
    with pytest.raises(UserError, match="open it with writable=True"):
        GraphGallery.open(path).remove(["3.png"])
    gallery = GraphGallery.open(path, writable=True)
    gallery.remove(["3.png", "299.png"])
    gallery.add(embeddings(points[300:], space, first=300))
    gallery.save(path)
    changed = GraphGallery.open(path)
    assert len(changed) == 398 and "3.png" not in changed.ids
    distances, found = changed.search_rows(points, 1)
    names = changed.ids[found[:, 0]]
    present = np.isin(np.arange(400), [3, 299], invert=True)
    assert np.mean(names[present] == [f"{i}.png" for i in np.flatnonzero(present)]) > 0.98
    assert not np.isin(["3.png", "299.png"], names).any() and (distances[~present] > 0).all()
    assert changed.labels[found[301, 0]] == "even"
    for wrong, words in (
        (embeddings(points[:1], space, fingerprint="other"), "embedded by another model"),
        (embeddings(points[300:301], space, first=300), "300.png is in the gallery; remove it"),
    ):
        with pytest.raises(UserError, match=words):
            gallery.add(wrong)
    with pytest.raises(UserError, match="3.png is not in the gallery"):
        gallery.remove(["3.png"])
    check_wrong_points_are_refused(gallery, points[:9], space)


def test_wrong_files_and_spaces_get_one_sentence(tmp_path):
    space, path = SPACES[1], tmp_path / "gallery.usearch"
    points = clusters(space, 100)
    with pytest.raises(UserError, match="there is no gallery at"):
        open_gallery(path)
    export_usearch(embeddings(points, space), path)
    gallery = open_gallery(str(path))
    assert len(gallery.nearest(points[:1], 101)[0].ids) == 100
    with pytest.raises(UserError, match="cannot write to .*usearch"):
        gallery.save(str(tmp_path / "missing/gallery.usearch"))
    for file, words in (
        (path, "there is no gallery at"),
        (tmp_path / "gallery.usearch.npy", "needs its points"),
        (tmp_path / "gallery.usearch.parquet", "needs its table"),
    ):
        whole = file.read_bytes()
        file.write_bytes(whole[:-50])
        with pytest.raises(UserError, match="is damaged, or .*; export the gallery again"):
            open_gallery(path)
        file.unlink()
        with pytest.raises(UserError, match=words):
            open_gallery(path)
        file.write_bytes(whole)
    fused = Fused(((Sphere(), 1.0), (space, 1.0)))
    with pytest.raises(UserError, match="there is no graph for"):
        GraphGallery.build(embeddings(np.tile(points, 2), fused))


@pytest.mark.parametrize("suffix", ["", ".npy", ".parquet"])
def test_flipped_bits_and_files_of_another_gallery_are_not_searched(suffix, tmp_path):
    space, path = SPACES[1], tmp_path / "gallery.usearch"
    points = clusters(space, 200)
    export_usearch(embeddings(points[::-1], space), path)
    file = tmp_path / f"gallery.usearch{suffix}"
    other = file.read_bytes()
    export_usearch(embeddings(points, space), path)
    whole, expected = file.read_bytes(), open_gallery(path).search_rows(points, 5)
    rng = np.random.default_rng(0)
    for place, bit in zip(rng.integers(0, len(whole), 20), rng.integers(0, 8, 20), strict=True):
        flipped = bytearray(whole)
        flipped[place] ^= 1 << bit
        file.write_bytes(flipped)
        try:
            gallery = open_gallery(path)
        except UserError as error:
            assert "export the gallery again" in str(error)
        else:  # Some bytes of Parquet mean nothing.
            assert suffix == ".parquet"
            np.testing.assert_array_equal(gallery.search_rows(points, 5), expected)
            assert gallery.ids.tolist() == [f"{i}.png" for i in range(200)]
    file.write_bytes(other)
    with pytest.raises(UserError, match="not the one that the table beside it describes"):
        open_gallery(path)


def test_a_save_that_is_killed_leaves_the_old_gallery_or_the_new_one(tmp_path, monkeypatch):
    space, folder, replace = SPACES[1], tmp_path / "folder", pathlib.Path.replace
    folder.mkdir()
    points = clusters(space, 60)
    old, new = (GraphGallery.build(embeddings(x, space)) for x in (points[:50], points))
    old.save(folder / "gallery.usearch")
    left = []  # What a kill before each replacement leaves.

    def replacing(source, target):
        left.append(shutil.copytree(folder, tmp_path / str(len(left))) / "gallery.usearch")
        return replace(source, target)

    def refusing(source, target):
        raise OSError(errno.EROFS, "read-only")

    with monkeypatch.context() as patched:
        patched.setattr(pathlib.Path, "replace", replacing)
        new.save(folder / "gallery.usearch")
        patched.setattr(pathlib.Path, "replace", refusing)
        with pytest.raises(UserError, match=r"cannot be finished \(read-only\); open it once as"):
            open_gallery(left[-1])
    assert [len(open_gallery(path)) for path in left] == [50, 60, 60, 60]
    for path in left:
        old.save(path)
        assert len(open_gallery(path)) == 50 and len(list(path.parent.iterdir())) == 3


@pytest.mark.parametrize("fails", [False, True])
def test_a_gallery_that_is_replaced_while_it_is_opened_is_read_again(tmp_path, monkeypatch, fails):
    space, path, read = SPACES[1], tmp_path / "gallery.usearch", graph._read_graph
    points = clusters(space, 200)
    waiting = [GraphGallery.build(embeddings(x, space)) for x in (points, points[::-1])]
    waiting.pop().save(path)

    def replacing(*args, **settings):
        if waiting:
            waiting.pop().save(path)
            assert not fails  # As when memory is mapped beyond the end of a shorter file.
        read(*args, **settings)

    monkeypatch.setattr(graph, "_read_graph", replacing)
    gallery = open_gallery(path)
    assert gallery.ids[gallery.search_rows(points, 1)[1][:, 0]].tolist() == gallery.ids.tolist()
    np.testing.assert_array_equal(gallery._table.points, points)


def test_tables_of_wrong_types_are_refused(tmp_path, monkeypatch):
    space, path = SPACES[1], tmp_path / "gallery.usearch"
    gallery = GraphGallery.build(embeddings(clusters(space, 20), space))
    dumps, change = json.dumps, {"x": 0}  # Of a later version.
    monkeypatch.setattr(json, "dumps", lambda value: dumps(value | change))
    gallery.save(path)
    assert len(open_gallery(path)) == 20
    wrong = {"candidates": "12", "recall": None, "rounded": 1, "space": {"name": "plane"}}
    for name, value in wrong.items():
        change = {name: value}
        gallery.save(path)
        with pytest.raises(UserError, match="is damaged, or of an earlier version"):
            open_gallery(path)


def test_a_graph_that_finds_too_little_says_so(monkeypatch, capsys):
    monkeypatch.setattr("hypjax.integrations.usearch._DENSE", (2, 2))
    monkeypatch.setattr("hypjax.integrations.usearch._CANDIDATES", (1,))
    monkeypatch.setattr("hypjax.integrations.usearch._SCANNED", (0.0,))
    gallery = GraphGallery.build(embeddings(clusters(SPACES[1], 3000), SPACES[1]))
    assert gallery.recall < 0.9
    assert (
        f"searches of the graph find {gallery.recall:.1%} of the 10 nearest"
        in capsys.readouterr().err
    )


def test_points_near_the_centre_are_scanned(monkeypatch, tmp_path):
    """They are found although the graph takes too few candidates; also those that are added."""
    monkeypatch.setattr("hypjax.integrations.usearch._SCANNED", (0.2,))
    ball, path = PoincareBall(1.0, None), tmp_path / "gallery.usearch"
    points = np.asarray(ball.embed(ann._features(4000, 128)))
    norms = np.linalg.norm(points, axis=1)
    central = norms <= np.quantile(norms[:3000], 0.19)
    built = GraphGallery.build(embeddings(points[:3000], ball))
    assert len(built._centre._items) == built._table.scanned.sum() >= 600
    built.save(path)
    gallery = GraphGallery.open(path, writable=True)
    gallery.add(embeddings(points[3000:], ball, first=3000))
    gallery.remove(["5.png"])
    gallery.save(path)
    gallery = open_gallery(path)
    names = np.array([int(name.removesuffix(".png")) for name in gallery.ids])
    own = np.arange(300)  # Rows of the images 0 to 4 and 6 to 300.
    queries = points[names[own]]
    exact_distances, exact = search(queries, own, points[names], k=10, space=ball)

    def found():
        gallery.candidates = 1
        hits = gallery.nearest(
            queries, 10, [os.path.realpath(f"{name}.png") for name in names[own]]
        )
        distances = np.array([each.distances for each in hits])
        items = np.array([each.keys for each in hits], int)
        assert (np.diff(distances) >= 0).all() and (items != own[:, None]).all()
        same = items == exact
        np.testing.assert_allclose(distances[same], exact_distances[same], rtol=1e-5)
        return (exact[:, :, None] == items[:, None]).any(axis=2)[central[names[exact]]]

    assert found().all()
    gallery._table.scanned[:] = False
    assert not found().all()


def test_points_far_out_are_reached_when_norms_differ():
    """In a random order, the same graph finds fewer of them."""
    ball = PoincareBall(1.0, None)
    points = np.asarray(ball.embed(ann._features(3000, 128)))
    gallery = GraphGallery.build(embeddings(points, ball))
    gallery.candidates, queries = 128, points[:500]
    check_neighbours(found_in(gallery, queries, 10), queries, points, ball, 0.99)


def test_the_benchmark_measures_every_engine(monkeypatch, tmp_path):
    monkeypatch.setattr(ann, "_SETTINGS", ((PoincareBall(1.0, None), 8),))
    monkeypatch.setattr(ann, "_CANDIDATES", (64,))
    rows = ann.rows(Options(quick=True, repeats=1, points=1500))
    recalls = {row["engine"]: row["recall"] for row in rows}
    ours, product = "usearch, own distance (--export=usearch)", "usearch, inner product of d + 1"
    assert recalls[ours] > 0.98 and recalls["usearch, cosine"] > 0.98 and recalls[product] < 0.5
    assert all(row["rate"] > 0 for row in rows)
    assert "times the time of usearch's cosine" in ann.table(rows)
    ann.draw(rows, tmp_path / "ann.png")
    assert (tmp_path / "ann.png").stat().st_size > 10_000


def test_the_documented_lines_need_no_hypjax(tmp_path, monkeypatch, capsys):
    space = SPACES[1]
    points = clusters(space, 500, dim=128)
    export_usearch(embeddings(points, space), tmp_path / "gallery.usearch")
    page = (REPOSITORY / "docs/engines.md").read_text()
    (example,) = [part for part in page.split("```") if "index.view" in part]
    assert "import hypjax" not in example and "from hypjax" not in example
    monkeypatch.chdir(tmp_path)
    exec(example.removeprefix("python"), {})
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    distances, found = search(points[:1], None, points, k=10, space=space)
    assert [name for _, name in printed] == [f"{i}.png" for i in found[0]]
    np.testing.assert_allclose([float(d) for d, _ in printed], distances[0], atol=1e-3)
