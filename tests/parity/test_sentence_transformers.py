"""Folders for sentence-transformers give what hypjax computes, and rank as its spaces do."""

import runpy

import jax
import numpy as np
import pytest
from PIL import Image

import hypjax
from hypjax.config import load_config
from hypjax.errors import UserError
from hypjax.geometry import Fused, Lorentz, PoincareBall, Sphere
from hypjax.inference import sentence_transformers_folder
from hypjax.models import create_embedder, model_shapes
from hypjax.models.pretrained import save_timm, timm_constructor
from hypjax.types import View
from tests.helpers import commands, small_runs
from tests.helpers.small_runs import REPOSITORY

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
    """Two runs with random weights: of images in colour, and of grey ones without a head."""
    folder = tmp_path_factory.mktemp("runs")
    grey = ("data.channels=1", "data.mean=(0.4,)", "data.std=(0.2,)", "data.test_view=squash")
    for name, fields in (("colour", ()), ("grey", (*grey, "model.head=none"))):
        small_runs.save_untrained(small_runs.load(photos_folder, *fields), folder / name)
    return folder


@pytest.fixture(scope="module")
def photos(photos_folder):
    return [Image.open(path) for path in sorted(photos_folder.rglob("*.png"))[::3]]


def convert(run, folder, fields, *flags):
    """Converts a run in which some fields are set; returns the run and its conversion."""
    copy, output = small_runs.copy_with(run, folder / "run", fields), folder / "model"
    words = ("--format=sentence-transformers", f"--workdir={copy}", f"--output={output}")
    commands.call("convert", *words, *flags)
    return copy, output


def opened(folder):
    return sentence_transformers.SentenceTransformer(str(folder), device="cpu")


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
    peer, model = opened(output), hypjax.load(run)
    vectors, points = peer.encode(photos), model.embed(photos)
    directions = points / np.linalg.norm(points, axis=1, keepdims=True)
    if name == "grey":  # Grey values of images in colour are not rounded.
        np.testing.assert_allclose(np.sum(vectors * directions, axis=1), 1, atol=1e-4)
        photos = [image.convert("L").convert("RGB") for image in photos]
        again, vectors = vectors, peer.encode(photos)
        assert not np.array_equal(vectors, again)
    np.testing.assert_allclose(vectors, directions, atol=2e-5)
    order = np.argsort(-peer.similarity(vectors, vectors).numpy(), axis=1)
    ordered = np.asarray(model.space.distance(points[:, None], points[order]))
    assert np.all(np.diff(ordered, axis=1) >= -1e-5 * ordered.max())


def test_lengths_that_matter_are_refused_or_written_with_a_distance(runs, photos, tmp_path):
    words = r"cosine does not rank as .*: of 18 test images, the features of 18 are not clipped"
    with pytest.raises(UserError, match=words):
        convert(runs / "colour", tmp_path / "unit", WHOLE)
    assert not (tmp_path / "unit/model").exists()
    run, output = convert(runs / "colour", tmp_path, WHOLE, "--features")
    model, vectors = hypjax.load(run), opened(output).encode(photos)
    points = model.embed(photos)
    np.testing.assert_allclose(model.space.embed(vectors), points, atol=2e-5)
    distance = runpy.run_path(output / "distance.py")["distance"]
    expected = model.space.distance(points[:, None], points)
    np.testing.assert_allclose(distance(vectors, vectors), expected, atol=2e-4)


@pytest.mark.parametrize(
    "space",
    [
        *(Sphere(), PoincareBall(0.3, 2.3), PoincareBall(1.0, None), PoincareBall(0.0, 1.0)),
        Lorentz(0.5, 2.0, 1.7),
        Fused(((Sphere(), 0.7), (PoincareBall(0.3, None), 2.0)), normalized=False),
    ],
    ids=str,
)
def test_the_written_distance_is_that_of_the_space(space, tmp_path, float64):
    features = 2 * np.random.default_rng(0).normal(size=(40, 6))
    source = sentence_transformers_folder.distance_function(space)
    (tmp_path / "distance.py").write_text(source)
    distance = runpy.run_path(tmp_path / "distance.py")["distance"]
    points = space.embed(features)
    expected = np.asarray(space.distance(points[:, None], points))
    np.testing.assert_allclose(distance(features, features), expected, atol=1e-6, rtol=1e-6)


def test_what_has_no_counterpart_is_refused(runs, photos_folder, tmp_path):
    for number, (fields, words) in enumerate(
        (
            ({"model.eval_pooling": "gem"}, "pools tokens by gem, which timm's model cannot"),
            ({"eval.scales": [1.0, 0.5]}, "this run sets eval.scales, for which sentence-tr"),
            ({**BALL, "data.path": str(tmp_path / "gone")}, "name a folder of images as --images"),
        )
    ):
        with pytest.raises(UserError, match=words):
            convert(runs / "colour", tmp_path / str(number), fields)
    flag = f"--images={photos_folder}"
    convert(runs / "colour", tmp_path / "2/again", {**BALL, "data.path": "/none"}, flag)


@pytest.mark.parametrize(("spec", "side"), [("dinov2", 28), ("lite,last", 64)])
def test_published_encoders_agree_with_timm(spec, side, tmp_path):
    config = load_config(
        str(REPOSITORY / f"configs/grocery.py:hyp-{spec}"),
        [f"data.image_size={side}", f"data.resize={side}"],
    )
    model, rng = create_embedder(config, evaluating=True), np.random.default_rng(0)
    params = jax.tree.map(
        lambda x: np.float32(rng.normal(0.05, 0.05, x.shape)),
        model_shapes(model, View.of(config.data)),
    )
    sentence_transformers_folder.write_model(tmp_path, config, model, params, normalize=False)
    save_timm(tmp_path / "timm.safetensors", params, model)
    peer = eval(timm_constructor(params, model), {"timm": timm}).eval()
    peer.load_state_dict(safetensors.load_file(tmp_path / "timm.safetensors"))
    pixels = rng.integers(0, 256, (2, side, side, 3), dtype=np.uint8)
    scaled = (pixels / 255 - config.data.mean) / config.data.std
    with torch.no_grad():
        expected = peer(torch.tensor(np.float32(scaled.transpose(0, 3, 1, 2)))).numpy()
    found = opened(tmp_path).encode([Image.fromarray(image) for image in pixels])
    np.testing.assert_allclose(found, expected, atol=2e-5 * np.ptp(expected))
