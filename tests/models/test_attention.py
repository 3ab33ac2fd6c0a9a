"""Attention, and the choice of its kernel."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hypjax.errors import UserError
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
def gpu(monkeypatch, tmp_path):
    """Makes the CPU pose as a GPU that has compiled nothing yet."""
    caches = attention._comparison, attention._warn_once
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    folder = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()
    jax.config.update("jax_compilation_cache_dir", folder)


def takes_cudnn(monkeypatch, kernel="auto"):
    """Whether a gradient that is traced, as in models, would be computed by cuDNN on a GPU."""
    kernels = {}
    monkeypatch.setattr(
        jax.lax, "platform_dependent", lambda *x, **by: kernels.update(by) or by["default"](*x)
    )
    arrays = [jnp.asarray(x, "bfloat16") for x in (queries, keys, values)]
    jax.jit(jax.grad(lambda *x: jnp.sum(attention.attend(*x, kernel=kernel))))(*arrays)
    return "cuda" in kernels


def replace_cudnn(monkeypatch, seconds=1.0, scale=1.0):
    """Puts XLA in the place of cuDNN, with other results and seconds than its own."""

    def by_cudnn(query, key, value, length):
        return attention._by_xla(query, key, value, length) * scale

    times = iter([seconds] * 3 + [2.0] * 3)
    monkeypatch.setattr(attention, "_by_cudnn", by_cudnn)
    monkeypatch.setattr(attention, "_seconds", lambda *_: next(times))


@pytest.mark.usefixtures("gpu")
def test_falls_back_to_xla_without_a_cudnn_kernel_and_warns_once():
    arrays = [jnp.asarray(x, "bfloat16") for x in (queries, keys, values)]
    with pytest.warns(UserWarning, match="cuDNN's fused attention cannot be used") as caught:
        for _ in range(2):
            mixed = jax.jit(lambda *x: attention.attend(*x))(*arrays)
    assert len(caught) == 1
    np.testing.assert_allclose(np.asarray(mixed, np.float64), expected(), atol=2e-2)
    with pytest.raises(UserError, match="set run.attention to xla"):
        attention.attend(*arrays, kernel="cudnn")


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("seconds", "kernel"), [(1.0, "cudnn"), (3.0, "xla")])
def test_the_faster_kernel_is_taken_and_remembered_by_later_processes(seconds, kernel, monkeypatch):
    replace_cudnn(monkeypatch, seconds)
    assert takes_cudnn(monkeypatch) == (kernel == "cudnn")
    attention._comparison.cache_clear()  # As in another process; nothing is timed again.
    assert takes_cudnn(monkeypatch) == (kernel == "cudnn")
    assert takes_cudnn(monkeypatch, kernel="cudnn") and not takes_cudnn(monkeypatch, kernel="xla")


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("part", "scale"), [(0, 1.5), (1, np.nan), (2, 1.5)])
def test_cudnn_is_not_used_if_a_gradient_is_wrong(scale, part, monkeypatch):
    replace_cudnn(monkeypatch)
    gradients = attention._gradients

    def with_one_wrong(function, *arguments):
        found, seconds = gradients(function, *arguments)
        if function is attention._by_cudnn:
            found = tuple(x * (scale if i == part else 1) for i, x in enumerate(found))
        return found, seconds

    monkeypatch.setattr(attention, "_gradients", with_one_wrong)
    with pytest.warns(UserWarning, match="its gradients are off by"):
        assert not takes_cudnn(monkeypatch)


@pytest.mark.usefixtures("gpu")
def test_cudnn_is_compared_for_fewer_images_where_xla_needs_too_much_memory(monkeypatch):
    replace_cudnn(monkeypatch)
    gradients = attention._gradients

    def if_it_fits(function, heads, length):
        if function is attention._by_xla and len(heads[0]) > 1:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
        return gradients(function, heads, length)

    monkeypatch.setattr(attention, "_gradients", if_it_fits)
    monkeypatch.setattr(attention, "_seconds", lambda *_: 1.0)
    assert takes_cudnn(monkeypatch)


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
