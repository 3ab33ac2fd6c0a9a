"""The encoder of texts: what tokens see, which one is the embedding, how training starts."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hypjax.models import attention, create_embedder
from hypjax.settings import EncoderSettings, ModelSettings, TextSettings
from hypjax.types import IMAGES, TEXTS, View

END = 99
CLIP = TextSettings(width=32, depth=2, num_heads=4, vocabulary=END + 1, context=12)
SIGLIP = TextSettings(
    width=32, depth=2, num_heads=4, vocabulary=100, context=8, activation="gelu_tanh", kind="siglip"
)
# Each ends in END, which zeros follow.
TEXT_IDS = np.zeros((5, 12), np.int32)
for row, length in enumerate((2, 5, 12, 7, 3)):
    TEXT_IDS[row, :length] = [98, *range(3 * row + 1, 3 * row + length - 1), END]


def embedder(settings, head="linear"):
    """A model of one tower, with random parameters of deviation 0.2, so that tokens mix."""
    model = create_embedder(ModelSettings(settings, head, 6))
    params = model.initial_parameters(jax.random.key(0), View(8, 8, 3))
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    noise = [x + 0.2 * jax.random.normal(key, x.shape) for x, key in zip(leaves, keys, strict=True)]
    return model, {"params": jax.tree.unflatten(tree, noise)}


def test_tokens_behind_the_end_change_nothing_and_may_be_cut():
    model, params = embedder(CLIP)
    expected = model.apply(params, TEXT_IDS).projected
    others = np.where(np.cumsum(TEXT_IDS == END, axis=1) - (TEXT_IDS == END), 50, TEXT_IDS)
    np.testing.assert_array_equal(model.apply(params, others).projected, expected)
    for ids, embedding in zip(TEXT_IDS, expected, strict=True):
        alone = ids[None, : np.argmax(ids) + 1]
        np.testing.assert_allclose(model.apply(params, alone).projected[0], embedding, atol=1e-5)
    changed = TEXT_IDS.copy()
    changed[:, 0] = 97
    assert np.abs(model.apply(params, changed).projected - expected).max(axis=1).min() > 1e-2


def test_clip_embeds_a_text_as_its_end_and_siglip_as_its_last_token():
    for settings, position in ((CLIP, TEXT_IDS.argmax(axis=1)), (SIGLIP, np.full(5, 7))):
        model, params = embedder(settings, "none")
        ids = TEXT_IDS[:, : settings.context]
        tokens = model.encoder.apply({"params": params["params"]["encoder"]}, ids, True)
        expected = tokens[np.arange(5), position]
        np.testing.assert_allclose(model.apply(params, ids).pooled, expected, atol=1e-6)


def test_tokens_of_siglip_see_those_behind_them():
    model, params = embedder(SIGLIP, "none")
    params = {"params": params["params"]["encoder"]}
    changed = TEXT_IDS[:, :8].copy()
    changed[:, -1] = 50
    tokens, others = (model.encoder.apply(params, ids, True) for ids in (TEXT_IDS[:, :8], changed))
    assert np.abs(tokens - others)[:, 0].max(axis=1).min() > 1e-2


@pytest.mark.parametrize("settings", [CLIP, SIGLIP])
def test_padding_for_tensor_cores_and_remat_change_only_rounding(settings):
    model, params = embedder(settings, "none")
    params = params["params"]["encoder"]
    ids = TEXT_IDS[:, : settings.context - 1]

    def value_and_gradient(**options):
        encoder = model.encoder.clone(**options)
        total = lambda params: jnp.sum(jnp.sin(encoder.apply({"params": params}, ids)))  # noqa: E731
        return jax.jit(jax.value_and_grad(total))(params)

    expected = value_and_gradient()
    recomputing = dataclasses.replace(settings, remat=True)
    for options in ({"tensor_cores": True}, {"settings": recomputing}):
        actual = value_and_gradient(**options)
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-4), actual, expected)


@pytest.mark.parametrize("queries", [3, 7])
@pytest.mark.parametrize("by", [attention._by_head, attention._by_xla])
def test_causal_attention(by, queries):
    query, key, value = (
        jax.random.normal(x, (2, 7, 3, 4)) for x in jax.random.split(jax.random.key(2), 3)
    )
    query = query[:, :queries]
    actual = by(query, key, value, length=None, causal=True)
    for i in range(queries):
        q, k, v = (
            np.asarray(x, np.float64) for x in (query[:, i], key[:, : i + 1], value[:, : i + 1])
        )
        weights = np.exp(np.einsum("bhd,bkhd->bhk", q, k) / 2)
        weights /= weights.sum(axis=-1, keepdims=True)
        expected = np.einsum("bhk,bkhd->bhd", weights, v)
        np.testing.assert_allclose(actual[:, i], expected, atol=1e-5)
    gradient = jax.grad(lambda k: by(query, k, value, length=None, causal=True).sum())(key)
    assert np.isfinite(gradient).all()


def test_training_starts_from_the_deviations_of_clip():
    tower = ModelSettings(TextSettings(width=256, depth=3, num_heads=4, context=20), "linear", 64)
    images = EncoderSettings("vit", View(8, 8, 3), patch_size=8, width=16, depth=1, num_heads=2)
    model = create_embedder(ModelSettings(images, "linear", 64, {TEXTS: tower}))
    params = model.initial_parameters(jax.random.key(0), images.view)
    encoder, head = params["towers_texts"]["encoder"], params["towers_texts"]["head"]
    assert head.keys() == {"kernel"} and params["head"].keys() == {"kernel"}
    block = encoder["block_1"]
    expected = {
        0.02: encoder["token_embed"],
        0.01: encoder["pos_embed"],
        256**-0.5: block["attention"]["qkv"]["kernel"],
        (2 * 256 * 3) ** -0.5: block["attention"]["proj"]["kernel"],
        (2 * 256 * 3) ** -0.5 + 1e-9: block["fc_2"]["kernel"],
        (2 * 256) ** -0.5: block["fc_1"]["kernel"],
        256**-0.5 + 1e-9: head["kernel"],
        16**-0.5: params["head"]["kernel"],
    }
    for deviation, kernel in expected.items():
        np.testing.assert_allclose(np.std(kernel), deviation, rtol=0.05)
    inputs = {IMAGES: jnp.zeros((2, 8, 8, 3)), TEXTS: TEXT_IDS}
    outputs = model.apply({"params": params}, inputs, method="embed")
    assert outputs[IMAGES].projected.shape == (2, 64) and outputs[TEXTS].pooled.shape == (5, 256)
