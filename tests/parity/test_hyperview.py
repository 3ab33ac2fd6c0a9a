"""A gallery in HyperView, a viewer of hyperbolic embeddings."""

import dataclasses
import os

import numpy as np
import pytest

from hypjax.engines.hyperview import export_hyperview
from hypjax.errors import UserError
from hypjax.geometry import Fused, PoincareBall, Sphere
from hypjax.retrieval import nearest_neighbors
from tests.helpers.galleries import embeddings

pytest.importorskip("lancedb", reason="needs lancedb, in which HyperView stores datasets")
hyperview = pytest.importorskip("hyperview", reason="needs hyperview")
BALL = PoincareBall(c=0.1, clip_radius=2.3)


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """HyperView's folder of datasets."""
    monkeypatch.setenv("HYPERVIEW_DATASETS_DIR", str(tmp_path / "datasets"))


def gallery(space):
    features = np.random.default_rng(0).normal(size=(60, 8)).astype(np.float32)
    found = embeddings(space.embed(features), space)
    labels = np.array(["", "wren", "robin"])[np.arange(60) % 3]
    return dataclasses.replace(found, labels=labels)


@pytest.mark.parametrize("space", [BALL, Sphere()], ids=["ball", "sphere"])
def test_it_finds_the_same_neighbours_and_shows_the_layout(space, tmp_path, monkeypatch):
    found = gallery(space)
    said = export_hyperview(found, tmp_path / "birds.hyperview")
    launched = []
    monkeypatch.setattr(hyperview, "launch", lambda *given, view: launched.append((*given, view)))
    exec(said.partition("\n")[2])
    ((dataset, view),) = launched
    samples = {os.path.relpath(each.filepath): each for each in dataset}
    assert len(samples) == 60 and all("/" not in each.id for each in samples.values())
    distances, nearest = nearest_neighbors(
        found.vectors, found.vectors, k=5, space=space, exclude_self=True
    )
    scale = 1 if space == BALL else 2  # HyperView's distance on the sphere is 1 − cos.
    for i in range(0, 60, 7):
        hits = dataset.find_similar(samples[found.ids[i]].id, k=5)
        assert [hit.id for hit, _ in hits] == [samples[found.ids[j]].id for j in nearest[i]]
        np.testing.assert_allclose([scale * d for _, d in hits], distances[i], rtol=1e-4)
    assert [samples[name].label for name in found.ids[:3]] == [None, "wren", "robin"]
    (layout,) = dataset.list_layouts()
    assert view.contents[0].contents[1].layout_key == layout.key and layout.geometry == "poincare"
    _, _, places = dataset.get_visualization_data(layout.key)[:3]
    assert len(places) == 60 and (np.linalg.norm(places, axis=1) < 1).all()


def test_datasets_are_not_overwritten_and_other_spaces_are_refused(tmp_path):
    export_hyperview(gallery(BALL), tmp_path / "birds.hyperview")
    with pytest.raises(UserError, match="has a dataset birds already"):
        export_hyperview(gallery(BALL), tmp_path / "birds.hyperview")
    fused = Fused(((Sphere(), 1.0), (BALL, 1.0)))
    with pytest.raises(UserError, match="HyperView has no space for"):
        export_hyperview(gallery(fused), tmp_path / "other.hyperview")
