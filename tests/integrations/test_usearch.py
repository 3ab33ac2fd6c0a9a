"""Galleries in a graph of usearch."""

import pathlib

import numpy as np
import pytest

from hypjax.errors import UserError
from hypjax.geometry import Lorentz, PoincareBall, Sphere
from hypjax.retrieval.embeddings import open_gallery
from hypjax.retrieval.neighbors import search
from tests.helpers import galleries
from tests.helpers.galleries import check_neighbours, clusters, embeddings, found_in
from tests.helpers.manual import program_with

pytest.importorskip("usearch.index", reason="needs the ann extra: usearch")
pytest.importorskip("numba", reason="needs the ann extra: numba")
from benchmarks import ann  # noqa: E402
from hypjax.integrations.usearch import GraphGallery, export_usearch  # noqa: E402

SPACES = [Sphere(), PoincareBall(1.0, None), PoincareBall(0.0, None), Lorentz(0.1, 2.3)]
BALL = PoincareBall(0.1, 2.3)


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_it_finds_the_exact_neighbours_and_their_distances(space, tmp_path):
    points = clusters(space, 3000)
    path = tmp_path / "gallery.usearch"
    said = export_usearch(embeddings(points, space), path)
    gallery = open_gallery(path)
    assert gallery.recall >= 0.98 and f"{gallery.recall:.1%}" in said
    assert gallery.index.dtype.name == "BF16"
    own, queries = np.arange(1000), points[:1000]
    check_neighbours(found_in(gallery, queries, 10, own), queries, points, space, 0.98, own)


@pytest.mark.parametrize(("c", "dim"), [(0.1, 64), (1.0, 8)])
def test_trees_are_searched_up_to_the_boundary(c, dim):
    ball, points = PoincareBall(c, None), galleries.tree(c, dim)
    assert np.sqrt(c) * np.linalg.norm(points, axis=1).max() > 0.99
    gallery = GraphGallery.build(embeddings(points, ball))
    assert gallery.recall >= 0.98
    assert gallery.index.dtype.name == "F32"  # Rounding would be too coarse.
    queries = points[-500:]
    check_neighbours(found_in(gallery, queries, 5), queries, points, ball, 0.98)


def test_images_are_added_found_removed_and_gone(tmp_path):
    points, path = clusters(BALL, 400), tmp_path / "gallery.usearch"
    GraphGallery.build(embeddings(points[:300], BALL)).save(path)
    with pytest.raises(UserError, match="writable=True"):
        GraphGallery.open(path).remove(["3.png"])
    gallery = GraphGallery.open(path, writable=True)
    assert gallery.nearest(points[301:302], 1)[0].ids != ["301.png"]
    gallery.remove(["3.png", "299.png"])
    gallery.add(embeddings(points[300:], BALL, first=300))
    gallery.save(path)
    changed = GraphGallery.open(path)
    assert len(changed) == 398 and "3.png" not in changed.ids
    distances, found = found_in(changed, points, 1)
    present = np.isin(np.arange(400), [3, 299], invert=True)
    assert np.mean(found[present, 0] == np.flatnonzero(present)) > 0.98
    assert not np.isin([3, 299], found).any() and (distances[~present] > 0).all()
    assert changed.nearest(points[301:302], 1)[0].labels == ["even"]
    for wrong, keyword in (
        (embeddings(points[:1], BALL, fingerprint="other"), "another model"),
        (embeddings(points[300:301], BALL, first=300), "300.png is in"),
        (embeddings(points[:1] * np.nan, BALL, first=900), "not finite"),
    ):
        with pytest.raises(UserError, match=keyword):
            gallery.add(wrong)
    with pytest.raises(UserError, match="3.png is not in"):
        gallery.remove(["3.png"])
    galleries.check_wrong_points_are_refused(gallery, points[:9], BALL)
    gallery.remove(gallery.ids.tolist())
    with pytest.raises(UserError, match="has no images any more"):
        gallery.nearest(points[:1], 1)


def test_it_finds_as_many_after_every_change_as_it_says(monkeypatch, tmp_path):
    """New images in the slots of removed ones would be reached by links to these."""
    monkeypatch.setattr("hypjax.integrations.usearch._DENSE", (8, 32))
    points = clusters(BALL, 2000, dim=64, seed=1)
    queries, points = points[1600:], points[:1600]
    gallery, path = GraphGallery.build(embeddings(points, BALL)), tmp_path / "gallery.usearch"
    for first, count in ((0, 800), (800, 100), (400, 800)):
        changed = slice(first, first + count)
        gallery.remove([f"{row}.png" for row in range(1600)[changed]])
        gallery.save(path)
        gallery = GraphGallery.open(path, writable=True)
        gallery.add(embeddings(points[changed], BALL, first=first))
        rebuilt = count == 800  # A hundred images are only compared with every query.
        assert len(gallery) == 1600 and len(gallery.index) == (1600 if rebuilt else 1500)
        order = np.array([int(name[:-4]) for name in gallery.ids])
        for k in (1, 10):
            found = found_in(gallery, queries, k)[1]
            exact = order[search(queries, None, gallery.vectors, k=k, space=BALL)[1]]
            share = (exact[:, :, None] == found[:, None]).any(axis=2).mean()
            assert share >= gallery.recall - 0.005


def test_all_images_find_themselves(monkeypatch, tmp_path):
    """No links of so sparse a graph lead to some of them."""
    monkeypatch.setattr("hypjax.integrations.usearch._DENSE", (12, 48))
    ball, path = PoincareBall(1.0, None), tmp_path / "gallery.usearch"
    points = np.asarray(ball.embed(ann._features(1500, 128)))
    gallery = GraphGallery.build(embeddings(points[:1400], ball))
    assert gallery.stray.mean() > 0.005 and gallery.recall >= 0.98
    gallery.add(embeddings(points[1400:], ball, first=1400))
    gallery.save(path)
    found = found_in(GraphGallery.open(path), points, 1)[1][:, 0]
    assert (found == np.arange(1500)).all()


def test_a_damaged_gallery_is_refused(tmp_path):
    path = tmp_path / "gallery.usearch"
    with pytest.raises(UserError, match="no gallery at"):
        open_gallery(path)
    export_usearch(embeddings(clusters(BALL, 60), BALL), path)
    for file in filter(pathlib.Path.is_file, path.rglob("*")):
        content = file.read_bytes()
        file.write_bytes(content[:-50])  # usearch itself crashes on such files.
        with pytest.raises(UserError, match="damaged"):
            open_gallery(path)
        file.write_bytes(content)


def test_the_documented_lines_need_no_hypjax(tmp_path, monkeypatch, capsys):
    points = clusters(BALL, 500, dim=128)
    export_usearch(embeddings(points, BALL), tmp_path / "gallery.usearch")
    monkeypatch.chdir(tmp_path)
    program = program_with("engines.md", "index.view")
    assert "hypjax" not in program.replace("hypjax embed", "")
    exec(program, {})
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    distances, found = search(points[:1], None, points, k=10, space=BALL)
    assert [name for _, name in printed] == [f"{i}.png" for i in found[0]]
    np.testing.assert_allclose([float(d) for d, _ in printed], distances[0], atol=1e-3)
