"""Galleries in Qdrant: in the embedded engine, and through the client of a server."""

import contextlib
import dataclasses
import fcntl
import http.server
import json
import re
import shutil
import threading

import numpy as np
import pytest

from hypjax.errors import UserError
from hypjax.geometry import Fused, Lorentz, PoincareBall, Sphere
from hypjax.integrations import qdrant_collections
from hypjax.integrations.qdrant import QdrantGallery, export_qdrant, point_id
from hypjax.retrieval.embeddings import describe_space
from hypjax.retrieval.gallery_files import find_export, open_gallery
from tests.helpers.galleries import (
    check_neighbours,
    check_wrong_points_are_refused,
    clusters,
    embeddings,
    tree,
)

pytest.importorskip("qdrant_edge", reason="needs the qdrant extra: qdrant-edge-py")
qdrant_client = pytest.importorskip("qdrant_client", reason="needs the qdrant extra: qdrant-client")
SPACES = [Sphere(), PoincareBall(0.1, 2.3), PoincareBall(1.0, None), PoincareBall(0.0, None)]
SPACES += [Lorentz(1.0, None)]


@pytest.fixture(params=["folder", "client"])
def engine(request, tmp_path):
    """The embedded engine, and the client, which computes by itself what it would ask a server."""
    if request.param == "folder":
        return qdrant_collections.Folder(tmp_path / "gallery.qdrant")
    client = qdrant_client.QdrantClient(":memory:")
    return qdrant_collections.Server(client, "gallery", "qdrant://here/gallery")


def added(engine, found):
    gallery = QdrantGallery.create(engine, found)
    gallery.add(found)
    return gallery


def nearest(gallery, queries, k):
    """Distances and items, [n, k]."""
    found = gallery.nearest(queries, k)
    items = [[int(name.removesuffix(".png")) for name in hits.ids] for hits in found]
    return np.array([hits.distances for hits in found]), np.array(items)


@pytest.mark.parametrize("space", [SPACES[0], *SPACES[2:]], ids=str)
def test_it_finds_the_exact_neighbours_and_their_distances(engine, space):
    points = clusters(space, 600)
    gallery = added(engine, embeddings(points, space))
    check_neighbours(nearest(gallery, points[:50], 10), points[:50], points, space, 1.0)


@pytest.mark.parametrize("space", [SPACES[0], SPACES[-1]], ids=str)
def test_images_are_read_by_their_ids_and_searched_within_a_class(engine, space):
    points = clusters(space, 60)
    found = embeddings(points, space)
    found = dataclasses.replace(found, labels=np.array(["a", "b", ""] * 20))
    gallery = added(engine, found)
    sample = gallery.sample(40)
    assert len({item.key for item in sample}) == 40 and gallery.count("b") == 20
    assert gallery.read([point_id("none")]) == []
    ids = [point_id(found.ids[7]), point_id("none"), point_id(found.ids[2])]
    read = gallery.read(ids)
    assert [item.path for item in read] == [found.ids[7], found.ids[2]]
    np.testing.assert_allclose([item.point for item in read], points[[7, 2]], rtol=1e-5, atol=1e-6)
    (hits,) = gallery.nearest(points[7:8], 20, label="b")
    assert hits.labels == ["b"] * 20 and hits.ids[0] == found.ids[7]
    assert hits.distances == sorted(hits.distances)


@pytest.mark.parametrize(("c", "dim"), [(1.0, 8), (0.1, 64)])
def test_trees_are_searched_up_to_the_boundary_by_the_graph(c, dim, tmp_path, monkeypatch):
    monkeypatch.setattr(qdrant_collections, "_SCANNED", 10)
    ball, points = PoincareBall(c, None), tree(c, dim)
    export_qdrant(embeddings(points, ball), tmp_path / "gallery.qdrant")
    gallery = open_gallery(tmp_path / "gallery.qdrant")
    assert gallery.recall >= 0.98 and gallery._collection._shard.info().indexed_vectors_count > 1000
    queries = points[-100:]
    check_neighbours(nearest(gallery, queries, 10), queries, points, ball, 0.98)


def test_no_candidate_is_lost_between_the_two_searches(tmp_path, monkeypatch):
    monkeypatch.setattr(qdrant_collections, "_SCANNED", 10)
    rng = np.random.default_rng(0)
    points = rng.normal(size=(2000, 32))
    points *= rng.uniform(0.2, 2, size=(2000, 1)) / np.linalg.norm(points, axis=1, keepdims=True)
    points = points.astype(np.float32)
    gallery = added(qdrant_collections.Folder(tmp_path / "gallery"), embeddings(points, SPACES[1]))
    gallery.candidates = 128
    found = [hits.ids for hits in gallery.nearest(points[:400], 10, exact=True)]
    assert [names[0] for names in found] == [f"{i}.png" for i in range(400)]


def test_images_are_added_found_replaced_removed_and_gone(engine):
    space = SPACES[1]
    points = clusters(space, 40)
    gallery = added(engine, embeddings(points[:0], space))
    gallery.tune(embeddings(points[:0], space))
    gallery.add(embeddings(points[:30], space))
    gallery.add(embeddings(points[25:], space, first=25))
    assert len(gallery) == 40
    gallery.remove(["3.png", "39.png"])
    kept = np.isin(np.arange(40), [3, 39], invert=True)
    found = nearest(gallery, points, 1)[1][:, 0]
    assert len(gallery) == 38 and ((found == np.arange(40)) == kept).all()
    assert gallery.has_class("odd") and not gallery.has_class("other")
    assert len(gallery.nearest(points[:1], 39)[0].ids) == 38
    check_wrong_points_are_refused(gallery, points, space)
    assert len(gallery) == 38


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


def exported(path, count, first=0):
    """Exports images."""
    points = clusters(SPACES[1], 60)[first : first + count]
    export_qdrant(embeddings(points, SPACES[1], first=first), path)


def ids(gallery):
    return sorted(nearest(gallery, clusters(SPACES[1], 1), len(gallery))[1][0])


def test_exports_into_one_folder_keep_the_images_of_all(tmp_path):
    path = tmp_path / "gallery.qdrant"
    space, points = SPACES[1], clusters(SPACES[1], 60)
    engines = [qdrant_collections.Folder(path) for _ in range(2)]  # Both find no folder.
    for first, engine in zip((0, 20), engines, strict=True):
        added(engine, embeddings(points[first : first + 20], space, first=first))
    one, two = (QdrantGallery.open(path) for _ in range(2))
    one.remove(["3.png"])
    assert ids(two) == list(range(40))  # Who reads keeps what was opened.
    with two._collection.changing():
        two.add(embeddings(points[40:], space, first=40))
        with (path / ".lock").open() as lock, pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    del one, two
    for opened in path.glob("shard-*"):  # Someone who opens it writes such files for a moment.
        (opened / ".atomicwrite1").mkdir()
        (opened / ".atomicwrite1/tmpfile.tmp").write_text("{")
    assert ids(QdrantGallery.open(path)) == [i for i in range(60) if i != 3]
    assert len(list(path.glob("shard-*"))) == 1


def test_an_export_that_is_killed_leaves_what_was_there(tmp_path, monkeypatch):
    path, killed, write_json = tmp_path / "gallery.qdrant", [], qdrant_collections.write_json

    def write(*args):
        killed.append(tmp_path / f"{len(killed)}.qdrant")
        shutil.copytree(path, killed[-1], copy_function=qdrant_collections._copy)
        write_json(*args)

    monkeypatch.setattr(qdrant_collections, "write_json", write)
    exported(path, 20)
    exported(path, 30, first=20)
    monkeypatch.undo()
    with pytest.raises(UserError, match="0.qdrant is unfinished; wait for its export to end, or"):
        open_gallery(killed[0])
    assert ids(open_gallery(killed[1])) == list(range(20))
    for left, first, count in ((killed[0], 0, 20), (killed[1], 20, 50)):
        exported(left, 20 + first // 2, first=first)
        assert ids(open_gallery(left)) == list(range(count))
        assert len(list(left.glob("shard-*"))) == 1
    with pytest.raises(ZeroDivisionError), open_gallery(path)._collection.changing():
        raise ZeroDivisionError
    assert ids(open_gallery(path)) == list(range(50)) and len(list(path.glob("shard-*"))) == 1


def test_damaged_folders_and_other_collections_get_one_sentence(tmp_path):
    path = tmp_path / "gallery.qdrant"
    with pytest.raises(UserError, match="there is no gallery at"):
        open_gallery(path)
    exported(path, 20)
    for name in ("edge_config.json", "segment.json", "status.dat", "chunk_0.mmap", "hypjax.json"):
        file = next(path.rglob(name))
        whole = file.read_bytes()
        flipped = bytearray(whole)
        flipped[len(whole) // 2] ^= 16
        file.write_bytes(flipped)
        with pytest.raises(UserError, match=f"{path} is damaged"):
            open_gallery(path)
        file.write_bytes(whole)
    open_gallery(path)
    (path / "hypjax.json").write_text("{}")
    with pytest.raises(UserError, match="was not written by this version of hypjax.embed"):
        open_gallery(path)
    client = qdrant_client.QdrantClient(":memory:")
    models = qdrant_client.models
    vectors = models.VectorParams(size=3, distance=models.Distance.COSINE)
    client.create_collection("birds", vectors_config=vectors)
    client.upsert("birds", [models.PointStruct(id=1, vector=[1, 2, 3])])
    server = qdrant_collections.Server(client, "birds", "qdrant://here/birds")
    with pytest.raises(UserError, match="was not written by hypjax.embed"):
        added(server, embeddings(clusters(SPACES[1], 20), SPACES[1]))


def test_a_collection_that_another_process_creates_meanwhile_is_filled(monkeypatch):
    client, points = qdrant_client.QdrantClient(":memory:"), clusters(SPACES[1], 20)
    models = qdrant_client.models
    vectors = models.VectorParams(size=32, distance=models.Distance.EUCLID)
    client.create_collection("birds", vectors_config=vectors)
    known = iter([True, False])
    monkeypatch.setattr(client, "collection_exists", lambda _: next(known, True))
    server = qdrant_collections.Server(client, "birds", "qdrant://here/birds")
    assert len(added(server, embeddings(points, SPACES[1]))) == 20


@contextlib.contextmanager
def answering(answers):
    """A server that gives these answers, by the last part of a request's path."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            answer = answers[self.path.rsplit("/", 1)[-1]]
            body = answer if isinstance(answer, str) else json.dumps({"result": answer})
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body.encode())

        do_POST = do_GET

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"qdrant://127.0.0.1:{server.server_port}/birds"
        server.shutdown()


def test_wrong_answers_of_a_server_get_one_sentence():
    def hit(i, **changed):
        payload = {"id": f"{i}.png", "label": "", "factor": 1.0}
        return {"id": i, "version": 1, "score": -float(i), "payload": payload} | changed

    facts = {"space": describe_space(SPACES[1]), "fingerprint": "model"}
    config = {
        "params": {"vectors": {"size": 2, "distance": "Euclid"}},
        "hnsw_config": {"m": 32, "ef_construct": 256, "full_scan_threshold": 10_000},
        "optimizer_config": {"flush_interval_sec": 5, "default_segment_number": 0},
        "metadata": {"hypjax": facts | {"candidates": 64, "recall": 1.0}},
    }
    info = {"status": "green", "optimizer_status": "ok", "points_count": 3, "config": config}
    info |= {"segments_count": 1, "payload_schema": {}}
    answers = {"exists": {"exists": True}, "birds": info, "count": {"count": 3}}
    query = np.zeros((1, 2), np.float32)
    with answering(answers) as url:
        gallery = QdrantGallery.open(url)
        answers["batch"] = [{"points": [hit(0), hit(1)]}]
        assert gallery.nearest(query, 2)[0].distances == [0, 1]
        results = (
            [hit(0), hit(1), hit(2)],
            [hit(1), hit(0)],
            [hit(1), hit(1)],
            [hit(0), hit(1, payload=None)],
            [hit(0), hit(1, payload={"id": "1.png"})],
            [hit(0), hit(1, payload={"id": 1, "label": ""})],
            [hit(0), hit(1, score=float("nan"))],
            [hit(0), hit(1, score="near")],
            [hit(0, score=0.5), hit(1)],
            *([hit(0, payload={"id": name, "label": ""})] for name in ("a\0b", "\ud800")),
        )
        others = "<html>Log in</html>", "[" * 10**5, None, [], [{"points": [hit(0), hit(1)]}] * 2
        for wrong in (*others, *([{"points": points}] for points in results)):
            answers["batch"] = wrong
            with pytest.raises(UserError, match="answers as no Qdrant of version 1.16 or newer"):
                gallery.nearest(query, 2)
        answers |= {"birds": "<html>", "count": {"count": 10**30}}
        for ask in (lambda: QdrantGallery.open(url), lambda: len(gallery)):
            with pytest.raises(UserError, match="answers as no Qdrant"):
                ask()


def test_a_server_that_is_away_is_retried_and_then_reported(monkeypatch, capsys):
    monkeypatch.setattr(qdrant_collections, "_WAITS", (0.01, 0.02))
    with pytest.raises(UserError, match=r"qdrant://localhost:1/birds does not answer \(") as error:
        open_gallery("qdrant://localhost:1/birds")
    assert "\n" not in str(error.value)
    assert len(re.findall("retrying in", capsys.readouterr().err)) == 2
    for url in ("qdrant://localhost:6333", "qdrant:///birds", "qdrant://h:a/x", "qdrant://[::1/x"):
        with pytest.raises(UserError, match="names no collection|is no address"):
            open_gallery(url)
    find_export("qdrant://localhost:1/birds")
