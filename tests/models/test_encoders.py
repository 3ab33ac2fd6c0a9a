"""The Vision Transformer, its attention, encoders cut in two, and the head."""

import functools
import types
from unittest import mock

import jax
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import pytest

from hypjax.config import load_config
from hypjax.config.settings import model_settings
from hypjax.models import (
    ConvNeXt,
    EfficientNetLite,
    Embedder,
    VisionTransformer,
    attention,
    create_embedder,
    layers,
)
from hypjax.models.embedder import in_precision
from hypjax.models.split_at_block import highest_frozen, lower_blocks, upper_blocks

SMALL = dict(image_size=16, patch_size=8, width=24, depth=1, num_heads=3)
images = np.random.default_rng(0).normal(size=(3, 16, 24, 3)).astype(np.float32)
queries, keys, values = np.random.default_rng(0).normal(size=(3, 2, 5, 3, 8))
VIT = VisionTransformer(image_size=16, patch_size=8, width=8, depth=3, num_heads=2)
CONVNEXT = ConvNeXt(image_size=16, depths=(1, 2), widths=(4, 6))


def weights_of(encoder, images):
    """Normally distributed weights, which take no time to compile."""
    shapes, rng = jax.eval_shape(encoder.init, jax.random.key(0), images), np.random.default_rng(0)
    return jax.tree.map(lambda x: np.float32(0.3 * rng.normal(size=x.shape)), shapes)["params"]


@pytest.fixture(scope="module")
def params():
    return weights_of(VisionTransformer(**SMALL), images)


def test_bfloat16_keeps_parameters_and_results_in_float32(params):
    half = VisionTransformer(**SMALL, dtype=jnp.bfloat16)
    initial = jax.eval_shape(half.init, jax.random.key(0), images)["params"]
    assert {x.dtype for x in jax.tree.leaves(initial)} == {jnp.dtype("float32")}
    embedded = jax.jit(half.apply)({"params": params}, images)
    full = jax.jit(VisionTransformer(**SMALL).apply)({"params": params}, images)
    assert embedded.dtype == jnp.float32
    error = np.linalg.norm(embedded - full) / np.linalg.norm(full)
    assert 0 < error < 2e-2


@pytest.mark.parametrize(
    ("device", "auto", "bfloat16"),
    [
        ({"platform": "cpu"}, "float32", "bfloat16"),
        ({"platform": "tpu"}, "bfloat16", "bfloat16"),
        ({"platform": "gpu", "compute_capability": "7.5"}, "float32", "float32"),
        ({"platform": "gpu", "compute_capability": "gfx90a"}, "bfloat16", "bfloat16"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*cannot multiply bfloat16")
def test_precision_is_what_the_device_has(device, auto, bfloat16):
    device = mock.Mock(spec=jax.Device, device_kind="Tesla T4", **device)
    expected = {"auto": auto, "float32": "float32", "bfloat16": bfloat16}
    for precision, actual in expected.items():
        config = load_config("glyphs", [f"model.precision={precision}"])
        assert create_embedder(model_settings(config), device=device).encoder.dtype.name == actual


@pytest.mark.parametrize("kind", ["dense", "norm_dense", "none"])
def test_heads_equal_their_formulas(kind, float64):
    model = Embedder(VisionTransformer(**SMALL), head_dim=7, head_kind=kind)
    x = np.random.default_rng(0).normal(size=(3, 24))
    variables = jax.jit(functools.partial(model.init, method="project"))(jax.random.key(0), x)
    outputs = model.apply(variables, x, method="project")
    if kind == "none":
        assert jax.eval_shape(model.init, jax.random.key(0), images)["params"].keys() == {"encoder"}
        assert not variables and np.array_equal(outputs.projected, outputs.pooled)
        return
    params = variables["params"]
    if kind == "norm_dense":
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    kernel = np.asarray(params["head"]["kernel"], np.float64)
    assert not params["head"]["bias"].any()
    np.testing.assert_allclose(kernel.T @ kernel, np.eye(7), atol=1e-6)
    np.testing.assert_allclose(outputs.projected, x @ kernel, atol=1e-5)


def test_the_arrangement_for_tensor_cores_changes_rounding_only(params):
    """Seven tokens are padded to eight, and all gradients agree, too."""

    @functools.partial(jax.jit, static_argnums=2)
    def both(params, images, tensor_cores):
        def total(params, images):
            encoder = VisionTransformer(**SMALL, tensor_cores=tensor_cores)
            embedded = encoder.apply({"params": params}, images)
            return jnp.sum(jnp.sin(embedded)), embedded

        return jax.grad(total, argnums=(0, 1), has_aux=True)(params, images)

    actual, expected = (jax.tree.leaves(both(params, images, cores)) for cores in (True, False))
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5)


def test_norms_keep_the_deviation_of_tokens_far_from_zero():
    x = np.float32(1000 + 0.1 * np.random.default_rng(0).normal(size=(4, 384)))
    centred = x - x.mean(axis=1, keepdims=True, dtype=np.float64)
    expected = centred / np.sqrt(np.mean(centred**2, axis=1, keepdims=True) + 1e-6)
    actual = layers._normalized(jnp.asarray(x), jnp.dtype("float32"), 1e-6)
    np.testing.assert_allclose(actual, expected, atol=2e-3)


@pytest.mark.parametrize("name", ["norm", "product", "weights"])
def test_gradients_of_norms_and_products_are_those_of_their_formulas(name):
    x, kernel = jnp.asarray(3 * images[0, 0] + 2), jnp.asarray(images[1, 0, :5])

    def norm(x):
        unit = x - jnp.mean(x, axis=-1, keepdims=True)
        return unit / jnp.sqrt(jnp.mean(unit**2, axis=-1, keepdims=True) + 1e-6)

    ours, formula, at = {
        "norm": (lambda x: layers._normalized(x, jnp.dtype("float32"), 1e-6), norm, x),
        "product": (lambda x: layers._product(x, kernel.T, "highest"), lambda x: x @ kernel.T, x),
        "weights": (lambda k: layers._product(x, k, "highest"), lambda k: x @ k, kernel.T),
    }[name]
    gradients = [
        jax.jit(jax.grad(lambda x, f=f: jnp.sum(jnp.sin(f(x)))))(at) for f in (ours, formula)
    ]
    np.testing.assert_allclose(*gradients, atol=1e-4)


@pytest.mark.slow
def test_compiled_gradients_of_maxima_are_those_of_each_operation(params):
    """Of jnp.max they are not on CPUs, where XLA computes its operand twice."""
    encoder = VisionTransformer(**SMALL | {"depth": 1}, pooling="max")
    gradient = jax.grad(lambda x: jnp.sum(jnp.sin(3 * encoder.apply({"params": x}, images))))
    actual, expected = map(jax.tree.leaves, (jax.jit(gradient)(params), gradient(params)))
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)


@pytest.mark.parametrize(("dtype", "error"), [("float32", 1e-6), ("bfloat16", 2e-2)])
def test_attention_equals_its_formula(dtype, error):
    products = np.einsum("bqhd,bkhd->bhqk", queries, keys) / np.sqrt(8)
    weights = np.exp(products) / np.sum(np.exp(products), axis=-1, keepdims=True)
    mixed = jax.jit(attention.attend)(*[jnp.asarray(x, dtype) for x in (queries, keys, values)])
    assert mixed.dtype == dtype
    expected = np.einsum("bhqk,bkhd->bqhd", weights, values)
    np.testing.assert_allclose(np.asarray(mixed, float), expected, atol=error)


def test_the_kernel_follows_from_the_card_and_the_shapes(monkeypatch):
    kernels, card = {}, types.SimpleNamespace()
    monkeypatch.setattr(jax, "local_devices", lambda: [card])
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda x, *_, **by: kernels.update(by) or x)
    for card.compute_capability, dim, expected in (
        ("7.5", 64, False),
        ("9.0", 20, False),
        ("9.0", 64, True),
    ):
        attention.attend(*[jnp.zeros((1, 4, 2, dim), "bfloat16")] * 3)
        assert ("cuda" in kernels) == expected


@pytest.mark.parametrize("tokens", [4, 5])
def test_padding_of_an_odd_number_of_tokens_is_masked(tokens, monkeypatch):
    """XLA stands in for cuDNN here, and gets the padded tokens."""
    dot_product_attention = jax.nn.dot_product_attention

    def by_xla(query, *others, implementation, **lengths):
        assert implementation == "cudnn" and query.shape[1] % 2 == 0
        return dot_product_attention(query, *others, implementation="xla", **lengths)

    arrays = [jnp.asarray(x[:, :tokens], jnp.float32) for x in (queries, keys, values)]
    plain = jax.jit(attention.attend)(*arrays)
    monkeypatch.setattr(jax.nn, "dot_product_attention", by_xla)
    mixed = jax.jit(lambda *arrays: attention._by_cudnn(*arrays, None, False))(*arrays)
    np.testing.assert_allclose(mixed, plain, atol=1e-6)


@pytest.mark.parametrize(
    ("encoder", "block"), [(VIT, "block_1"), (CONVNEXT, "stage_1_block_0")], ids=["vit", "convnext"]
)
def test_the_upper_part_embeds_what_the_lower_part_computes(encoder, block):
    @jax.jit
    def compute(params, images):
        activations = lower_blocks(encoder, block, params, images)
        upper = upper_blocks(encoder, block, params, activations, jnp.zeros_like(images[:1]))
        return activations, upper, encoder.apply({"params": params}, images)

    square = images[:2, :, :16]
    activations, upper, expected = compute(weights_of(encoder, square), square)
    np.testing.assert_allclose(upper, expected, rtol=1e-4, atol=1e-5)
    assert activations.ndim > 2 and activations.dtype == jnp.float32


def test_the_highest_frozen_block_has_only_frozen_layers_below():
    assert highest_frozen(VIT, ["block_2", "norm"]) == "block_1"
    assert highest_frozen(VIT, ["block_1"]) == "block_0"
    assert highest_frozen(VIT, ["block_2", "cls_token"]) is None
    assert highest_frozen(VIT, ["block_0"]) is None
    assert highest_frozen(CONVNEXT, ["stage_1_block_1"]) == "stage_1_block_0"
    assert highest_frozen(CONVNEXT, ["stage_1_downsample"]) == "stage_0_block_0"
    upper = [f"stage_5_block_{i}" for i in range(4)] + ["stage_6_block_0", "head_conv"]
    assert highest_frozen(EfficientNetLite(image_size=32), upper) == "stage_4_block_2"


def test_a_residual_stream_in_half_precision_is_near_the_one_in_float32():
    """Values and gradients, which are float32; in float32 nothing of it is left."""
    config = load_config("glyphs", ["model.precision=bfloat16", "model.residual=products"])
    model = create_embedder(model_settings(config))
    assert model.encoder.residual == jnp.bfloat16 == model.encoder.dtype
    exact = in_precision(model, jnp.float32).encoder
    assert exact.residual == jnp.float32 == exact.dtype
    square = images[:, :, :16]
    params = {"params": jax.tree.map(lambda x: 0.3 * x, weights_of(VIT, square))}

    @functools.partial(jax.jit, static_argnums=0)
    def values_and_gradients(encoder):
        value = lambda params: jnp.sum(encoder.apply(params, square)[:, ::2])  # noqa: E731
        return [encoder.apply(params, square), *jax.tree.leaves(jax.grad(value)(params))]

    half = VIT.clone(dtype=jnp.bfloat16)
    results = [values_and_gradients(x) for x in (half, half.clone(residual=jnp.bfloat16))]
    scale = jnp.concatenate([x.ravel() for x in values_and_gradients(VIT)[1:]]).std()
    for expected, plain, rounded in zip(values_and_gradients(VIT), *results, strict=True):
        assert rounded.dtype == jnp.float32
        errors = [jnp.sqrt(jnp.mean((x - expected) ** 2)) for x in (plain, rounded)]
        assert errors[1] < max(4 * errors[0], 0.05 * scale), expected.shape
