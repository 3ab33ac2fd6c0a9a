"""Attention, and which kernel computes it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hypjax.models import attention

queries, keys, values = np.random.default_rng(0).normal(size=(3, 2, 5, 3, 8))


def expected():
    products = np.einsum("bqhd,bkhd->bhqk", queries, keys) / np.sqrt(8)
    shares = np.exp(products - products.max(axis=-1, keepdims=True))
    shares /= shares.sum(axis=-1, keepdims=True)
    return np.einsum("bhqk,bkhd->bqhd", shares, values)


@pytest.mark.parametrize(("dtype", "error"), [("float32", 1e-6), ("bfloat16", 2e-2)])
def test_values_are_mixed_by_the_softmax_of_products(dtype, error):
    arrays = [jnp.asarray(x, dtype) for x in (queries, keys, values)]
    mixed = attention.attend(*arrays)
    assert mixed.dtype == dtype
    np.testing.assert_allclose(np.asarray(mixed, np.float64), expected(), atol=error)


def test_where_cudnn_has_no_kernel_xlas_is_taken_and_that_is_told(monkeypatch, capsys):
    """A CPU that calls itself a GPU has none."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    attention._cudnn_can.cache_clear()
    arrays = [jnp.asarray(x, "bfloat16") for x in (queries, keys, values)]
    try:
        for _ in range(2):
            mixed = jax.jit(attention.attend)(*arrays)
    finally:
        attention._cudnn_can.cache_clear()
    np.testing.assert_allclose(np.asarray(mixed, np.float64), expected(), atol=2e-2)
    told = capsys.readouterr().err
    assert told.count("cuDNN's fused attention cannot be used (") == 1


@pytest.mark.parametrize("tokens", [4, 5])
def test_what_fills_up_an_odd_number_of_tokens_is_not_seen(tokens, monkeypatch):
    """CuDNN's part of the work is done by XLA here, on the tokens that cuDNN would be given."""
    attention_by = jax.nn.dot_product_attention

    def by_xla(query, *others, implementation, **lengths):
        assert implementation == "cudnn" and query.shape[1] % 2 == 0
        return attention_by(query, *others, implementation="xla", **lengths)

    arrays = [jnp.asarray(x[:, :tokens], jnp.float32) for x in (queries, keys, values)]
    plain = attention.attend(*arrays)
    monkeypatch.setattr(jax.nn, "dot_product_attention", by_xla)
    mixed = attention._by_cudnn(*arrays)
    np.testing.assert_allclose(mixed, plain, atol=1e-6)
