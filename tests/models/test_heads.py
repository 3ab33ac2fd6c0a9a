"""The heads between the encoder's embedding and the one that is trained."""

import jax
import numpy as np
import pytest

import hypjax
from hypjax import train
from hypjax.errors import UserError
from hypjax.inference.embedder import TrainedEmbedder
from hypjax.models import Embedder, VisionTransformer, create_embedder
from hypjax.models.pretrained import save_timm, timm_constructor
from tests.helpers import small_runs

ENCODER = VisionTransformer(image_size=16, patch_size=8, width=24, depth=1, num_heads=2)
IMAGES = np.random.default_rng(0).normal(size=(5, 16, 16, 3)).astype(np.float32)


@pytest.mark.parametrize("kind", ["dense", "norm_dense", "none"])
def test_heads_equal_their_formulas(kind, float64):
    model = Embedder(ENCODER, head_dim=7, head_kind=kind)
    params = jax.jit(model.init)(jax.random.key(0), IMAGES)["params"]
    outputs = jax.jit(model.apply)({"params": params}, IMAGES)
    x = np.asarray(outputs.pooled, np.float64)
    if kind == "none":
        assert params.keys() == {"encoder"} and np.array_equal(outputs.projected, outputs.pooled)
        return
    if kind == "norm_dense":
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    kernel = np.asarray(params["head"]["kernel"], np.float64)
    assert not params["head"]["bias"].any()
    np.testing.assert_allclose(kernel.T @ kernel, np.eye(7), atol=1e-6)
    np.testing.assert_allclose(outputs.projected, x @ kernel, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["norm_dense", "none"])
def test_a_run_with_another_head_trains_and_embeds(kind, photos_folder, tmp_path):
    config = small_runs.load(photos_folder, f"model.head={kind}", "train.total_steps=4")
    results = train.train_and_evaluate(config, tmp_path / "run")
    if kind == "none":  # Scored in the ball and by cosine; all points are clipped to one norm.
        assert results["final"]["head"] == results["final"]["encoder"]
    embedder = TrainedEmbedder(tmp_path / "run")
    model = create_embedder(config)
    assert model.head_dim == (16 if kind == "none" else 8)
    params = embedder._params
    assert ("head" in params) == (kind != "none")
    save_timm(tmp_path / "w.safetensors", params, model)
    assert "num_classes=0" in timm_constructor(params, model)
    published = TrainedEmbedder(hypjax.push(tmp_path / "run", "me/a", folder=tmp_path / "a"))
    assert published.fingerprint == embedder.fingerprint
    with pytest.raises(UserError, match="config.model.head is dense, but in the run in"):
        weights = (f"model.weights={tmp_path / 'run'}", "model.load_head=True")
        train.train_and_evaluate(small_runs.load(photos_folder, *weights), tmp_path / "other")
