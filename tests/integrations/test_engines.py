"""Engines, HyperView and pytorch-metric-learning beside exact searches and scores."""

import dataclasses
import os

import numpy as np
import pytest

from hypjax.galleries.embeddings import find_export
from hypjax.geometry import Lorentz, PoincareBall, Sphere
from hypjax.retrieval.neighbors import search
from tests.helpers.galleries import clusters, embeddings
from tests.helpers.manual import program_with

BALL, HYPERBOLOID = PoincareBall(0.1, 2.3), Lorentz(0.1, 2.3)
COMMON = ("def nearest(candidates", "import pyarrow.parquet\n\ngallery =")


def run(*contents, then=""):
    """Runs the programs of the manual that contain these texts; returns what they print."""
    printed = []
    source = "\n".join([*(program_with("engines.md", text) for text in contents), then])
    exec(source, {"print": lambda *values: printed.extend(values)})
    return printed


@pytest.fixture
def neighbours(tmp_path, monkeypatch):
    """Ids and distances of the ten nearest to the first items of a gallery that was exported."""
    monkeypatch.chdir(tmp_path)
    points = clusters(BALL, 300, dim=128)
    gallery = embeddings(points, BALL)
    gallery.save(tmp_path / "gallery.npz")
    find_export("parquet")(gallery, tmp_path / "gallery.parquet")
    distances, items = search(points[:5], None, points, k=10, space=BALL)
    return gallery.ids[items], np.asarray(distances)


def check(found, neighbours):
    ids, distances = found
    assert ids.tolist() == neighbours[0][0].tolist()
    np.testing.assert_allclose(distances, neighbours[1][0], rtol=1e-5, atol=1e-5)


def test_lancedb_finds_hyperbolic_neighbours(neighbours):
    pytest.importorskip("lancedb", reason="needs lancedb")
    check(run(*COMMON, "import lancedb")[0], neighbours)


def test_postgres_finds_hyperbolic_neighbours(neighbours, postgres, monkeypatch):
    psycopg = pytest.importorskip("psycopg", reason="needs psycopg")
    connect = psycopg.connect
    monkeypatch.setattr(psycopg, "connect", lambda _, **how: connect(postgres.get_uri(), **how))
    check(run(*COMMON, "import psycopg")[0], neighbours)


def test_indices_of_faiss_find_hyperbolic_neighbours(neighbours, tmp_path):
    pytest.importorskip("faiss", reason="needs faiss")
    ids, distances = run("import faiss\nfrom hypjax.retrieval import euclidean")  # A graph.
    np.testing.assert_array_equal(ids, neighbours[0])
    np.testing.assert_allclose(distances, neighbours[1], rtol=1e-5, atol=1e-5)
    gallery = embeddings(clusters(BALL, 300, dim=128), BALL)
    find_export("faiss")(gallery, tmp_path / "gallery.faiss")
    ids, items = run("index.search(embeddings.search_vectors", then="print(found)")
    assert ids.tolist() == neighbours[0][0].tolist()
    np.testing.assert_array_equal(gallery.ids[items[:5]], neighbours[0])


@pytest.mark.parametrize("space", [HYPERBOLOID, Sphere()], ids=str)
def test_hyperview_finds_the_same_and_shows_the_layout(space, tmp_path, monkeypatch):
    pytest.importorskip("lancedb", reason="needs lancedb")
    hyperview = pytest.importorskip("hyperview", reason="needs hyperview")
    monkeypatch.setenv("HYPERVIEW_DATASETS_DIR", str(tmp_path / "datasets"))
    features = np.random.default_rng(0).normal(size=(60, 8)).astype(np.float32)
    gallery = embeddings(space.embed(features), space)
    gallery = dataclasses.replace(gallery, labels=np.array(["", "wren", "robin"] * 20))
    write = find_export("hyperview")
    said = write(gallery, tmp_path / "birds.hyperview")
    launched = {}
    monkeypatch.setattr(hyperview, "launch", lambda *sets, view: launched.update(a=sets, b=view))
    exec(said.partition("\n")[2])
    (dataset,), view = launched.values()
    samples = {os.path.relpath(sample.filepath): sample for sample in dataset}
    points = gallery.vectors
    distances, nearest = search(points, np.arange(60), points, k=5, space=space)
    scale = 2 if space == Sphere() else 1  # HyperView's distance on the sphere is 1 − cos.
    for i in range(0, 60, 7):
        hits = dataset.find_similar(samples[gallery.ids[i]].id, k=5)
        assert [hit.id for hit, _ in hits] == [samples[gallery.ids[j]].id for j in nearest[i]]
        np.testing.assert_allclose([scale * d for _, d in hits], distances[i], rtol=1e-4)
    assert [samples[name].label for name in gallery.ids[:3]] == [None, "wren", "robin"]
    (layout,) = dataset.list_layouts()
    assert view.contents[0].contents[1].layout_key == layout.key and layout.geometry == "poincare"
    places = dataset.get_visualization_data(layout.key)[2]
    assert len(places) == 60 and (np.linalg.norm(places, axis=1) < 1).all()
