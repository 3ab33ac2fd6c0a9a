"""Galleries in Qdrant: in the embedded engine, and through the client of a server."""

import dataclasses
import re

import jax
import numpy as np
import pytest

from hypjax.errors import UserError
from hypjax.geometry import Fused, PoincareBall, Sphere
from hypjax.retrieval import qdrant_engines
from hypjax.retrieval.exports import find_export, open_gallery
from hypjax.retrieval.neighbors import search
from hypjax.retrieval.qdrant import QdrantGallery, export_qdrant
from tests.helpers.galleries import clusters, embeddings, tree

pytest.importorskip("qdrant_edge", reason="needs the qdrant extra: qdrant-edge-py")
qdrant_client = pytest.importorskip("qdrant_client", reason="needs the qdrant extra: qdrant-client")
SPACES = [Sphere(), PoincareBall(0.1, 2.3), PoincareBall(1.0, None), PoincareBall(0.0, None)]


@pytest.fixture(params=["folder", "client"])
def engine(request, tmp_path):
    """The embedded engine, and the client, which computes by itself what it would ask a server."""
    if request.param == "folder":
        return qdrant_engines.Folder(tmp_path / "gallery.qdrant")
    client = qdrant_client.QdrantClient(":memory:")
    return qdrant_engines.Server(client, "gallery", "qdrant://here/gallery")


def added(engine, found):
    gallery = QdrantGallery.create(engine, found)
    gallery.add(found)
    return gallery


def check(gallery, points, queries, space, k, recall):
    """Neighbours are the exact ones to this share, and distances those of the space."""
    found = gallery.nearest(queries, k)
    _, exact = search(queries, None, points, k=k, space=space)
    rows = np.array([[int(name.removesuffix(".png")) for name in hits.ids] for hits in found])
    assert (exact[:, :, None] == rows[:, None]).any(axis=2).mean() >= recall
    distances = np.array([hits.distances for hits in found])
    assert (np.diff(distances) >= 0).all()
    with jax.enable_x64(True):
        wide = queries[:, None].astype(np.float64), points[rows].astype(np.float64)
        expected = np.asarray(space.distance(*wide))
    np.testing.assert_allclose(distances, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_it_finds_the_exact_neighbours_and_their_distances(engine, space):
    points = clusters(space, 600)
    gallery = added(engine, embeddings(points, space))
    check(gallery, points, points[:50], space, 10, recall=1.0)


@pytest.mark.parametrize(("c", "dim"), [(1.0, 8), (0.1, 64)])
def test_trees_are_searched_up_to_the_boundary_by_the_graph(c, dim, tmp_path, monkeypatch):
    monkeypatch.setattr(qdrant_engines, "_SCANNED", 10)
    ball, points = PoincareBall(c, None), tree(c, dim)
    export_qdrant(embeddings(points, ball), tmp_path / "gallery.qdrant")
    gallery = open_gallery(tmp_path / "gallery.qdrant")
    assert gallery.recall >= 0.98 and gallery._engine._shard.info().indexed_vectors_count > 1000
    check(gallery, points, points[-100:], ball, 10, recall=0.98)


def test_images_are_added_found_replaced_removed_and_gone(engine):
    space = SPACES[1]
    points = clusters(space, 40)
    gallery = added(engine, embeddings(points[:30], space))
    gallery.add(embeddings(points[25:], space, first=25))
    assert len(gallery) == 40
    gallery.remove(["3.png", "39.png"])
    found = [hits.ids[0] for hits in gallery.nearest(points, 1)]
    kept = [i for i in range(40) if i not in (3, 39)]
    assert len(gallery) == 38 and [found[i] for i in kept] == [f"{i}.png" for i in kept]
    assert found[3] != "3.png" and found[39] != "39.png"
    assert gallery.has_class("odd") and not gallery.has_class("other")
    with pytest.raises(UserError, match="k is 39, but there are 38 items in"):
        gallery.nearest(points, 39)


def test_a_query_is_not_its_own_neighbour(engine, tmp_path):
    space = SPACES[1]
    points = clusters(space, 20)
    found = embeddings(points, space)
    paths = [str(tmp_path / name) for name in found.ids]
    gallery = added(engine, dataclasses.replace(found, ids=np.array(paths)))
    first, last = gallery.nearest(points[[4, 4]], 19, [paths[4], ""])
    assert paths[4] not in first.ids and first.own_label == found.labels[4]
    assert last.ids[0] == paths[4] and last.own_label == ""


def test_a_gallery_of_another_model_or_space_is_refused(engine):
    space = SPACES[1]
    points = clusters(space, 20)
    added(engine, embeddings(points, space))
    other = embeddings(points, space, fingerprint="other")
    with pytest.raises(UserError, match="holds images that another model embedded"):
        added(engine, other)
    with pytest.raises(UserError, match="there is no approximate search in"):
        fused = Fused(((Sphere(), 1.0), (space, 1.0)))
        engine.facts = lambda: None
        added(engine, embeddings(np.tile(points, 2), fused))


def test_damaged_folders_and_other_collections_get_one_sentence(tmp_path):
    path = tmp_path / "gallery.qdrant"
    with pytest.raises(UserError, match="there is no gallery at"):
        open_gallery(path)
    export_qdrant(embeddings(clusters(SPACES[1], 20), SPACES[1]), path)
    config = path / "edge_config.json"
    whole = config.read_text()
    config.write_text(whole[:20])
    with pytest.raises(UserError, match=f"cannot open {path}"):
        open_gallery(path)
    config.write_text(whole)
    (path / "hypjax.json").write_text("{}")
    with pytest.raises(UserError, match="was not written by hypjax.embed"):
        open_gallery(path)
    client = qdrant_client.QdrantClient(":memory:")
    models = qdrant_client.models
    vectors = models.VectorParams(size=3, distance=models.Distance.COSINE)
    client.create_collection("birds", vectors_config=vectors)
    client.upsert("birds", [models.PointStruct(id=1, vector=[1, 2, 3])])
    server = qdrant_engines.Server(client, "birds", "qdrant://here/birds")
    with pytest.raises(UserError, match="was not written by hypjax.embed"):
        added(server, embeddings(clusters(SPACES[1], 20), SPACES[1]))


def test_a_server_that_is_away_is_retried_and_then_reported(monkeypatch, capsys):
    monkeypatch.setattr(qdrant_engines, "_WAITS", (0.01, 0.02))
    with pytest.raises(UserError, match=r"qdrant://localhost:1/birds does not answer \(") as error:
        open_gallery("qdrant://localhost:1/birds")
    assert "\n" not in str(error.value)
    assert len(re.findall("retrying in", capsys.readouterr().err)) == 2
    for url in ("qdrant://localhost:6333", "qdrant:///birds"):
        with pytest.raises(UserError, match="names no collection"):
            open_gallery(url)
    assert find_export("qdrant://localhost:1/birds").module == "qdrant_client"
