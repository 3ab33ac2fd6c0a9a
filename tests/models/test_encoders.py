"""The Vision Transformer and the head."""

import contextlib
import types

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import pytest

import hypjax
from hypjax.config import load_config
from hypjax.errors import UserError
from hypjax.inference.model import load
from hypjax.models import Embedder, VisionTransformer, create_embedder, layers, vit
from hypjax.models.pretrained import timm_constructor
from hypjax.training import train
from tests.helpers import small_runs

SMALL = dict(image_size=16, patch_size=8, width=24, depth=2, num_heads=3)
images = np.random.default_rng(0).normal(size=(3, 16, 24, 3)).astype(np.float32)


@pytest.fixture(scope="module")
def params():
    return jax.jit(VisionTransformer(**SMALL).init)(jax.random.key(0), images)["params"]


def test_embedding_is_the_class_token_of_an_image_and_does_not_depend_on_the_batch(params):
    encoder = VisionTransformer(**SMALL)
    tokens = encoder.apply({"params": params}, images, return_tokens=True)
    assert tokens.shape == (3, 1 + 2 * 3, 24) and tokens.dtype == jnp.float32
    together = encoder.apply({"params": params}, images)
    np.testing.assert_allclose(together, tokens[:, 0], atol=2e-6)
    alone = encoder.apply({"params": params}, images[1:2])
    np.testing.assert_allclose(together[1:2], alone, atol=1e-5)


def test_patches_match_their_position_embeddings(params):
    """Moving a patch together with its position embedding does not change the set of tokens."""
    changed = images.copy()
    changed[:, :8, :8], changed[:, 8:, 16:] = images[:, 8:, 16:], images[:, :8, :8]
    order = jnp.array([0, 6, 2, 3, 4, 5, 1])
    moved = params | {"pos_embed": params["pos_embed"][:, order]}
    encoder = VisionTransformer(**SMALL)
    expected = encoder.apply({"params": params}, images)
    np.testing.assert_allclose(encoder.apply({"params": moved}, changed), expected, atol=1e-5)


def test_bfloat16_keeps_parameters_and_results_in_float32(params):
    half = VisionTransformer(**SMALL, dtype=jnp.bfloat16)
    initial = jax.eval_shape(half.init, jax.random.key(0), images)["params"]
    assert {x.dtype for x in jax.tree.leaves(initial)} == {jnp.dtype("float32")}
    embedded = half.apply({"params": params}, images)
    full = VisionTransformer(**SMALL).apply({"params": params}, images)
    assert embedded.dtype == jnp.float32
    error = np.linalg.norm(embedded - full) / np.linalg.norm(full)
    assert 0 < error < 2e-2


@pytest.mark.slow
@pytest.mark.parametrize("gate", ["packed", "separate"])
def test_every_option_of_blocks_computes_gradients_in_bfloat16(gate):
    """Norms of hidden layers, whose input is bfloat16, have float32 statistics."""
    design = vit.BlockDesign(
        activation="silu",
        gate=gate,
        mlp_norm=True,
        qkv_bias="qv",
        qkv_packed=gate == "packed",
        layer_scale=True,
        rotary=vit.Rotary(temperature=100, centred=True, halves=gate == "packed"),
    )
    sizes = SMALL | {"num_heads": 2, "registers": 1, "attention_pool": 3}  # A head has 12.
    full = VisionTransformer(**sizes, blocks=design, pooling="map")
    rng = np.random.default_rng(1)
    shapes = jax.eval_shape(full.init, jax.random.key(0), images)["params"]
    params = jax.tree.map(lambda x: rng.normal(size=x.shape).astype("f") / 5 + 0.1, shapes)

    def value(params, dtype):
        return jnp.sum(jnp.sin(full.clone(dtype=dtype).apply({"params": params}, images)))

    gradient = jax.jit(jax.grad(value), static_argnums=1)
    exact = jax.flatten_util.ravel_pytree(gradient(params, jnp.float32))[0]
    found = jax.flatten_util.ravel_pytree(gradient(params, jnp.bfloat16))[0]
    assert found.dtype == jnp.float32
    assert 0 < np.linalg.norm(found - exact) < 0.1 * np.linalg.norm(exact)


GPU = {"platform": "gpu", "device_kind": "Tesla T4"}


@pytest.mark.parametrize(
    ("device", "auto", "bfloat16"),
    [
        ({"platform": "cpu"}, "float32", "bfloat16"),
        ({"platform": "tpu"}, "bfloat16", "bfloat16"),
        ({**GPU, "compute_capability": "7.5"}, "float32", "float32"),
        ({**GPU, "compute_capability": "gfx90a"}, "bfloat16", "bfloat16"),
    ],
)
@pytest.mark.filterwarnings("error")
def test_precision_is_what_the_device_has(device, auto, bfloat16):
    device = types.SimpleNamespace(**device)
    found = {}
    for precision in ("auto", "float32", "bfloat16"):
        config = load_config("glyphs", [f"model.precision={precision}"])
        replaced = precision != "float32" and bfloat16 == "float32"
        warned = pytest.warns(match="Tesla T4 cannot multiply bfloat16; float32 takes its place")
        with warned if replaced else contextlib.nullcontext():
            found[precision] = create_embedder(config, device=device).encoder.dtype.name
    assert found == {"auto": auto, "float32": "float32", "bfloat16": bfloat16}


@pytest.mark.parametrize("kind", ["dense", "norm_dense", "none"])
def test_heads_equal_their_formulas(kind, float64):
    model = Embedder(VisionTransformer(**SMALL), head_dim=7, head_kind=kind)
    params = jax.jit(model.init)(jax.random.key(0), images)["params"]
    outputs = jax.jit(model.apply)({"params": params}, images)
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
def test_a_run_without_a_head_embeds_with_its_encoder(photos_folder, tmp_path):
    config = small_runs.load(photos_folder, "model.head=none")
    small_runs.save_untrained(config, tmp_path / "run")
    embedder = load(tmp_path / "run")
    model = create_embedder(config)
    assert model.head_dim == 16 and "head" not in embedder.params
    assert "num_classes=0" in timm_constructor(embedder.params, model)
    published = load(hypjax.push(tmp_path / "run", "me/a", folder=tmp_path / "a"))
    assert published.fingerprint == embedder.fingerprint
    weights = (f"model.weights={tmp_path / 'run'}", "model.load_head=True")
    with pytest.raises(UserError, match="config.model.head is dense, but in the run in"):
        train.train_and_evaluate(small_runs.load(photos_folder, *weights), tmp_path / "other")


@pytest.mark.slow
def test_the_arrangement_for_tensor_cores_changes_rounding_only(params):
    """Seven tokens are padded to eight, and all gradients agree, too."""

    def embed(params, images, tensor_cores):
        encoder = VisionTransformer(**SMALL, tensor_cores=tensor_cores)
        return encoder.apply({"params": params}, images)

    def gradient(tensor_cores):
        function = lambda *args: jnp.sum(jnp.sin(embed(*args, tensor_cores)))  # noqa: E731
        return jax.jit(jax.grad(function, argnums=(0, 1)))(params, images)

    np.testing.assert_allclose(embed(params, images, True), embed(params, images, False), atol=2e-6)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), gradient(True), gradient(False)
    )


@pytest.mark.parametrize("name", ["norm", "product", "weights"])
def test_gradients_of_norms_and_products_are_those_of_their_formulas(name):
    x, kernel = 3 * images[0, 0] + 2, images[1, 0, :5]

    def norm(x):
        unit = x - jnp.mean(x, axis=-1, keepdims=True)
        return unit / jnp.sqrt(jnp.mean(unit**2, axis=-1, keepdims=True) + 1e-6)

    ours, formula, at = {
        "norm": (lambda x: layers._normalized(x, jnp.dtype("float32"), 1e-6), norm, x),
        "product": (lambda x: layers._product(x, kernel.T, "highest"), lambda x: x @ kernel.T, x),
        "weights": (lambda k: layers._product(x, k, "highest"), lambda k: x @ k, kernel.T),
    }[name]
    gradients = [jax.grad(lambda x: jnp.sum(jnp.sin(f(x))))(at) for f in (ours, formula)]  # noqa: B023
    np.testing.assert_allclose(*gradients, atol=1e-4)


@pytest.mark.slow
def test_compiled_gradients_of_maxima_are_those_of_each_operation(params):
    """Of jnp.max they are not on CPUs, where XLA computes its operand twice."""
    encoder = VisionTransformer(**SMALL | {"depth": 1}, pooling="max")

    def total(params):
        return jnp.sum(jnp.sin(3 * encoder.apply({"params": params}, images)))

    gradient = jax.grad(total)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4),
        jax.jit(gradient)(params),
        gradient(params),
    )


def test_products_of_a_float32_encoder_are_true_float32_also_in_the_gradient(params):
    def total(params):
        return jnp.sum(VisionTransformer(**SMALL).apply({"params": params}, images))

    products = [
        line
        for line in jax.jit(jax.grad(total)).lower(params).as_text().splitlines()
        if "dot_general" in line
    ]
    assert len(products) > 20 and all("HIGHEST" in line for line in products)
