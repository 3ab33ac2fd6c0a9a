"""Attention, and the choice of its kernel."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hypjax.models import attention

queries, keys, values = np.random.default_rng(0).normal(size=(3, 2, 5, 3, 8))


def expected():
    products = np.einsum("bqhd,bkhd->bhqk", queries, keys) / np.sqrt(8)
    weights = np.exp(products - products.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("bhqk,bkhd->bqhd", weights, values)


@pytest.mark.parametrize(("dtype", "error"), [("float32", 1e-6), ("bfloat16", 2e-2)])
def test_attention_equals_its_formula(dtype, error):
    arrays = [jnp.asarray(x, dtype) for x in (queries, keys, values)]
    mixed = attention.attend(*arrays)
    assert mixed.dtype == dtype
    np.testing.assert_allclose(np.asarray(mixed, np.float64), expected(), atol=error)


@pytest.mark.parametrize(
    ("capability", "dtype", "dim", "kernel"),
    [
        ("9.0", "bfloat16", 64, "cudnn"),
        ("10.0", "float16", 64, "cudnn"),
        ("7.5", "float16", 64, "xla"),
        ("9.0", "bfloat16", 20, "xla"),
    ],
)
def test_the_kernel_follows_from_the_card_and_the_shapes(
    capability, dtype, dim, kernel, monkeypatch
):
    card = types.SimpleNamespace(compute_capability=capability)
    monkeypatch.setattr(jax, "local_devices", lambda: [card])
    kernels = {}
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *_, **by: kernels.update(by))
    attention.attend(*[jnp.zeros((1, 4, 2, dim), dtype)] * 3)
    assert ("cuda" in kernels) == (kernel == "cudnn")


@pytest.mark.parametrize("tokens", [4, 5])
def test_padding_of_an_odd_number_of_tokens_is_masked(tokens, monkeypatch):
    """XLA stands in for cuDNN here, and gets the padded tokens."""
    dot_product_attention = jax.nn.dot_product_attention

    def by_xla(query, *others, implementation, **lengths):
        assert implementation == "cudnn" and query.shape[1] % 2 == 0
        return dot_product_attention(query, *others, implementation="xla", **lengths)

    arrays = [jnp.asarray(x[:, :tokens], jnp.float32) for x in (queries, keys, values)]
    plain = attention.attend(*arrays)
    monkeypatch.setattr(jax.nn, "dot_product_attention", by_xla)
    mixed = attention._by_cudnn(*arrays)
    np.testing.assert_allclose(mixed, plain, atol=1e-6)
