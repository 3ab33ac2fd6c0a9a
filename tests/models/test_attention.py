"""Attention, and the choice of its kernel."""

import warnings

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


@pytest.fixture
def gpu(monkeypatch):
    """Makes the CPU pose as a GPU, with nothing known yet about cuDNN."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    attention._cudnn_supports.cache_clear()
    yield
    attention._cudnn_supports.cache_clear()


@pytest.mark.usefixtures("gpu")
def test_falls_back_to_xla_without_a_cudnn_kernel_and_warns_once():
    arrays = [jnp.asarray(x, "bfloat16") for x in (queries, keys, values)]
    with pytest.warns(UserWarning, match="cuDNN's fused attention cannot be used") as caught:
        for _ in range(2):
            mixed = jax.jit(lambda *x: attention.attend(*x))(*arrays)
    assert len(caught) == 1
    np.testing.assert_allclose(np.asarray(mixed, np.float64), expected(), atol=2e-2)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("agrees", [True, False])
def test_cudnn_is_used_only_if_it_agrees_with_xla(agrees, monkeypatch):
    """The check runs while a gradient is traced, as in models; the trace shows the kernels."""

    def fake_cudnn(query, key, value):
        return attention._by_xla(query, key, value) * (1 if agrees else 1.5)

    monkeypatch.setattr(attention, "_by_cudnn", fake_cudnn)
    kernels = {}
    monkeypatch.setattr(
        jax.lax, "platform_dependent", lambda *x, **by: kernels.update(by) or by["default"](*x)
    )
    arrays = [jnp.asarray(x, "bfloat16") for x in (queries, keys, values)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        jax.jit(jax.grad(lambda *x: jnp.sum(attention.attend(*x))))(*arrays)
    assert ("cuda" in kernels) == agrees
    assert any("off" in str(warning.message) for warning in caught) != agrees


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
