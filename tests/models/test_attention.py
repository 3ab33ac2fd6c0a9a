"""Attention, and which kernel computes it."""

import warnings

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


@pytest.fixture
def gpu(monkeypatch):
    """A CPU that calls itself a GPU, and has not been asked yet what cuDNN can."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    attention._cudnn_supports.cache_clear()
    yield
    attention._cudnn_supports.cache_clear()


@pytest.mark.usefixtures("gpu")
def test_where_cudnn_has_no_kernel_xlas_is_taken_and_that_is_told_once():
    arrays = [jnp.asarray(x, "bfloat16") for x in (queries, keys, values)]
    with pytest.warns(UserWarning, match="cuDNN's fused attention cannot be used") as told:
        for _ in range(2):
            mixed = jax.jit(lambda *x: attention.attend(*x))(*arrays)
    assert len(told) == 1
    np.testing.assert_allclose(np.asarray(mixed, np.float64), expected(), atol=2e-2)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("right", [True, False])
def test_cudnn_is_taken_if_it_agrees_with_xla(right, monkeypatch):
    """Within a gradient, where models are traced; what a platform is given shows in the trace."""

    def stand_in(query, key, value):
        return attention._by_xla(query, key, value) * (1 if right else 1.5)

    monkeypatch.setattr(attention, "_by_cudnn", stand_in)
    kernels = {}
    monkeypatch.setattr(
        jax.lax, "platform_dependent", lambda *x, **by: kernels.update(by) or by["default"](*x)
    )
    arrays = [jnp.asarray(x, "bfloat16") for x in (queries, keys, values)]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        jax.jit(jax.grad(lambda *x: jnp.sum(attention.attend(*x))))(*arrays)
    assert ("cuda" in kernels) == right
    assert any("off" in str(warning.message) for warning in told) != right


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
