"""Folders for sentence-transformers give what hypjax computes, and rank as its spaces do."""

import runpy

import numpy as np
import pytest
from PIL import Image

import hypjax
from hypjax.errors import UserError
from hypjax.geometry import Fused, Lorentz, PoincareBall, Sphere
from hypjax.geometry.registry import describe_space
from hypjax.integrations import sentence_transformers as sentence_transformers_folder
from tests.helpers import commands, small_runs
from tests.helpers.manual import programs

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


@pytest.fixture
def letters(photos_folder, tmp_path, monkeypatch):
    """The current folder, which has images where the manual's programs look for them."""
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters/test").symlink_to(photos_folder)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def shown(number):
    """Runs a program of the manual; returns its variables."""
    values = {}
    exec(programs("take-it-with-you.md", "sentence-transformers")[number], values)
    return values


def convert(run, folder, fields, *flags):
    """Converts a run in which some fields are set; returns the run and its conversion."""
    copy, output = small_runs.copy_with(run, folder / "run", fields), folder / "model"
    words = ("--format=sentence-transformers", f"--workdir={copy}", f"--output={output}")
    commands.call("convert", *words, *flags)
    return copy, output


CASES = {
    "sphere": ("colour", {"objective.space": "sphere"}),
    "ball": ("colour", {**BALL, "model.head": "norm_dense"}),
    "hyperboloid": ("grey", {**BALL, "objective.space": "lorentz"}),
}


@pytest.mark.parametrize("case", CASES)
def test_cosines_rank_as_the_space(runs, photos, letters, capsys, case):
    name, fields = CASES[case]
    run, output = convert(runs / name, letters, fields)
    assert "Cosine ranks as the distance in" in capsys.readouterr().out
    peer = sentence_transformers.SentenceTransformer(str(output), device="cpu")
    model = hypjax.load(run)
    vectors, points = peer.encode(photos), model.embed(photos)
    directions = points / np.linalg.norm(points, axis=1, keepdims=True)
    if name == "grey":  # Grey values of images in colour are not rounded.
        np.testing.assert_allclose(np.sum(vectors * directions, axis=1), 1, atol=1e-4)
        vectors = peer.encode([image.convert("L").convert("RGB") for image in photos])
    np.testing.assert_allclose(vectors, directions, atol=2e-5)
    order = np.argsort(-peer.similarity(vectors, vectors).numpy(), axis=1)
    ordered = np.asarray(model.space.distance(points[:, None], points[order]))
    assert np.all(np.diff(ordered, axis=1) >= -1e-5 * ordered.max())


def test_features_are_of_one_length_where_all_are_clipped():
    features = np.array([[0.99], [1.01], [40.0]]) * 2.3 * np.float32([[0.6, -0.8]])
    ball = PoincareBall(10.0, 2.3)
    for space in (ball, Lorentz(0.1, 2.3), Fused(((Sphere(), 1.0), (ball, 1.0)), normalized=False)):
        marked = sentence_transformers_folder._clipped(space, features)
        assert marked.tolist() == [False, True, True]


def test_lengths_that_matter_are_refused_or_written_with_a_distance(runs, photos, letters):
    with pytest.raises(UserError, match="cosine does not rank .* 18 of"):
        convert(runs / "colour", letters / "unit", WHOLE)
    assert not (letters / "unit/model").exists()
    with pytest.raises(UserError, match="gem"):
        convert(runs / "colour", letters / "gem", {"model.eval_pooling": "gem"})
    run, output = convert(runs / "colour", letters, WHOLE, "--features")
    output.rename("letters-features")
    found, model = shown(1), hypjax.load(run)
    points = model.embed(photos)
    np.testing.assert_allclose(model.space.embed(found["features"][::3]), points, atol=2e-5)
    expected = model.space.distance(points[0], points)
    np.testing.assert_allclose(found["distances"][::3], expected, atol=2e-4)


@pytest.mark.parametrize(
    "space",
    [
        *(Sphere(), PoincareBall(0.3, 2.3), PoincareBall(1.0, None), PoincareBall(0.0, 1.0)),
        Lorentz(0.5, 2.0, 1.7),
        Fused(((Sphere(), 0.7), (PoincareBall(0.3, None), 2.0)), normalized=False),
        Fused(((Sphere(), 5.0), (PoincareBall(0.1, 2.3), 5.0))),
    ],
    ids=str,
)
def test_the_written_distance_is_that_of_the_space(space, tmp_path, float64):
    features = 2 * np.random.default_rng(0).normal(size=(40, 6))
    source = sentence_transformers_folder._DISTANCE
    text = source.format(space=space, described=describe_space(space))
    (tmp_path / "distance.py").write_text(text)
    distance = runpy.run_path(tmp_path / "distance.py")["distance"]
    points = space.embed(features)
    expected = np.asarray(space.distance(points[:, None], points))
    np.testing.assert_allclose(distance(features, features), expected, atol=1e-6, rtol=1e-6)
