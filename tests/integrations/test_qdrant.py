"""Galleries on a server of Qdrant, for which the client's local mode stands."""

import numpy as np
import pytest

from hypjax.errors import UserError
from hypjax.galleries.embeddings import find_export, open_gallery
from hypjax.geometry import Lorentz, PoincareBall, Sphere
from tests.helpers import galleries
from tests.helpers.galleries import check_neighbours, clusters, embeddings, found_in

qdrant_client = pytest.importorskip("qdrant_client", reason="needs the qdrant extra")
from hypjax.integrations import qdrant, servers  # noqa: E402

BALL, HYPERBOLOID = PoincareBall(0.1, 2.3), Lorentz(1.0, None)


@pytest.fixture
def server(monkeypatch):
    """The URL of a server, whose collection the client holds in memory."""
    client = qdrant_client.QdrantClient(":memory:")
    monkeypatch.setattr(qdrant, "_connect", lambda url: (client, "gallery"))
    return "qdrant://here/gallery"


def export(url, images):
    """Exports images, and opens the gallery."""
    assert "100.0% of the 10 nearest" in find_export(url)(images, None)
    return open_gallery(url)


SPACES = [Sphere(), PoincareBall(1.0, None), PoincareBall(0.0, None), HYPERBOLOID]


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_it_finds_the_exact_neighbours_and_their_distances(server, space):
    points = clusters(space, 300)
    gallery = export(server, embeddings(points, space))
    check_neighbours(found_in(gallery, points[:25], 10), points[:25], points, space, 1.0)


def test_a_tree_is_searched_up_to_the_boundary(server, monkeypatch):
    monkeypatch.setattr(qdrant.QdrantGallery, "_tune", lambda *_: 1)  # Slow in local mode.
    ball, points = PoincareBall(1.0, None), galleries.tree(1.0, 8, levels=7)
    gallery = export(server, embeddings(points, ball))
    queries = points[-15:]
    assert len(gallery.shells) > 4
    for gallery.by_shell, gallery.candidates in ((True, 10), (False, 10)):
        gallery._write_facts()
        recall = 0.9 if gallery.by_shell else 1.0
        check_neighbours(found_in(gallery, queries, 10), queries, points, ball, recall)


def test_held_out_queries_choose_shells_where_they_need_fewer_candidates(server, monkeypatch):
    lists = qdrant.QdrantGallery._nearest
    points = galleries.tree(1.0, 4, levels=5)

    def lossy(self, centres, count, wanted):  # Like a graph of all images near the boundary.
        found = lists(self, centres, count, wanted)
        lost = wanted.shell is None and not wanted.exact
        return [images[::2] if lost else images for images in found]

    monkeypatch.setattr(qdrant.QdrantGallery, "_nearest", lossy)
    find_export(server)(embeddings(points, PoincareBall(1.0, None)), None)
    gallery = open_gallery(server)
    assert gallery.by_shell
    (hits,) = gallery.nearest(points[-1:], 3, label="even")
    assert hits.labels == ["even"] * 3


def test_an_open_gallery_finds_images_in_shells_that_were_added(server, monkeypatch):
    monkeypatch.setattr(qdrant.QdrantGallery, "_tune", lambda *_: 1)  # Leaves searches to shells.
    ball = PoincareBall(1.0, None)
    points = np.random.default_rng(0).normal(size=(30, 4)) / 20
    points[20:] *= 0.99 / np.linalg.norm(points[20:], axis=1, keepdims=True)
    points = points.astype(np.float32)
    gallery = export(server, embeddings(points[:20], ball))
    export(server, embeddings(points[20:], ball, first=20))
    assert [hits.ids[0] for hits in gallery.nearest(points[20:], 1)] == [
        f"{i}.png" for i in range(20, 30)
    ]


def test_images_are_added_read_replaced_and_removed(server):
    points = clusters(BALL, 40)
    export(server, embeddings(points[:30], BALL))
    gallery = export(server, embeddings(points[25:], BALL, first=25))
    assert len(gallery) == 40
    gallery.remove(["3.png", "39.png"])
    present = np.isin(np.arange(40), [3, 39], invert=True)
    for opened in (gallery, open_gallery(server)):
        items = found_in(opened, points, 1)[1][:, 0]
        assert len(opened) == 38 and ((items == np.arange(40)) == present).all()
    assert gallery.classes() == ["even", "odd"]
    own = np.arange(5, 9)  # A query is not its own neighbour.
    check_neighbours(found_in(gallery, points[own], 1, own), points[own], points, BALL, 0, own)
    own = np.array([7, 7, 8])  # The same file twice, as when two requests share a call.
    check_neighbours(found_in(gallery, points[own], 5, own), points[own], points, BALL, 0, own)
    keys = [servers.image_key(name) for name in ("7.png", "none", "2.png")]
    items = gallery.read(["x", *keys])
    assert [item.path for item in items] == ["7.png", "2.png"]
    np.testing.assert_allclose([item.point for item in items], points[[7, 2]], rtol=1e-5, atol=1e-6)
    (hits,) = gallery.nearest(points[7:8], 30, label="even")
    assert hits.labels == ["even"] * 18 and hits.keys[0] == keys[0]
    galleries.check_wrong_points_are_refused(gallery, points, BALL)
    assert len(gallery) == 38


def test_another_models_images_are_refused(server):
    points = clusters(BALL, 20)
    export(server, embeddings(points, BALL))
    with pytest.raises(UserError, match="another model"):
        export(server, embeddings(points, BALL, fingerprint="other"))


def test_a_server_that_is_away_is_refused():
    with pytest.raises(UserError, match="does not answer"):
        open_gallery("qdrant://localhost:1/birds")
