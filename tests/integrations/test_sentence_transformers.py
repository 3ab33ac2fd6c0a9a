"""Folders for sentence-transformers give what hypjax computes, and rank as its spaces do."""

import numpy as np
import pytest
from PIL import Image

import hypjax
from hypjax.errors import UserError
from hypjax.geometry import Fused, Lorentz, PoincareBall, Sphere
from hypjax.integrations import sentence_transformers as sentence_transformers_folder
from tests.helpers import commands, small_runs

sentence_transformers = pytest.importorskip(
    "sentence_transformers", reason="needs sentence-transformers"
)
safetensors = pytest.importorskip("safetensors.torch", reason="needs torch")
timm = pytest.importorskip("timm", reason="needs timm")
torch = pytest.importorskip("torch", reason="needs torch")

BALL = {"objective.space": "poincare", "objective.clip_radius": 0.05}
WHOLE = {"objective.space": "poincare", "objective.clip_radius": None}


@pytest.fixture(scope="module")
def runs(photos_folder, tmp_path_factory):
    """Two runs with random weights: of images in colour, and of grey ones, scaled as letters."""
    folder = tmp_path_factory.mktemp("runs")
    grey = ("data.channels=1", "data.mean=(0.085,)", "data.std=(0.24,)", "data.test_view=squash")
    for name, fields in (("colour", ()), ("grey", grey)):
        small_runs.save_untrained(small_runs.load(photos_folder, *fields), folder / name)
    return folder


@pytest.fixture(scope="module")
def photos(photos_folder):
    return [Image.open(path) for path in sorted(photos_folder.rglob("*.png"))[::3]]


def convert(run, folder, fields):
    """Converts a run in which some fields are set; returns the run and its conversion."""
    copy, output = small_runs.copy_with(run, folder / "run", fields), folder / "model"
    words = ("--format=sentence-transformers", f"--workdir={copy}", f"--output={output}")
    commands.call("convert", *words)
    return copy, output


CASES = {
    "sphere": ("colour", {"objective.space": "sphere"}),
    "ball": ("colour", {**BALL, "model.head": "norm_dense"}),
    "hyperboloid": ("grey", {**BALL, "objective.space": "lorentz"}),
}


@pytest.mark.parametrize("case", CASES)
def test_cosines_rank_as_the_space(runs, photos, tmp_path, capsys, case):
    name, fields = CASES[case]
    run, output = convert(runs / name, tmp_path, fields)
    assert "Cosine ranks as the distance in" in capsys.readouterr().out
    peer = sentence_transformers.SentenceTransformer(str(output), device="cpu")
    model = hypjax.load(run)
    vectors, points = peer.encode(photos), model.embed(photos)
    directions = points / np.linalg.norm(points, axis=1, keepdims=True)
    if name == "grey":  # Grey values of images in colour are not rounded.
        np.testing.assert_allclose(np.sum(vectors * directions, axis=1), 1, atol=1e-4)
        vectors = peer.encode([image.convert("L").convert("RGB") for image in photos])
    np.testing.assert_allclose(vectors, directions, atol=2e-6)
    # Cosines of the grey images are 0.999 to 1. In float32 their order is that of the rounding, so
    # the ranks are those of float64.
    units = np.float64(vectors) / np.linalg.norm(np.float64(vectors), axis=1, keepdims=True)
    np.testing.assert_allclose(peer.similarity(vectors, vectors), units @ units.T, atol=1e-6)
    order = np.argsort(-units @ units.T, axis=1)
    ordered = np.asarray(model.space.distance(points[:, None], points[order]))
    assert np.all(np.diff(ordered, axis=1) >= -1e-5 * ordered.max())


def test_features_are_of_one_length_where_all_are_clipped():
    features = np.array([[0.99], [1.01], [40.0]]) * 2.3 * np.float32([[0.6, -0.8]])
    ball = PoincareBall(10.0, 2.3)
    for space in (ball, Lorentz(0.1, 2.3), Fused(((Sphere(), 1.0), (ball, 1.0)), normalized=False)):
        marked = sentence_transformers_folder._clipped(space, features)
        assert marked.tolist() == [False, True, True]


def test_lengths_that_matter_are_refused(runs, tmp_path):
    with pytest.raises(UserError, match="cosine does not rank .* 18 of"):
        convert(runs / "colour", tmp_path / "unit", WHOLE)
    assert not (tmp_path / "unit/model").exists()
    with pytest.raises(UserError, match="gem"):
        convert(runs / "colour", tmp_path / "gem", {"model.eval_pooling": "gem"})
    with pytest.raises(UserError, match="pads images with black"):
        convert(runs / "colour", tmp_path / "padded", {"data.test_view": "letterbox"})
