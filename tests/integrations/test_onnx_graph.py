"""Functions of JAX, translated to ONNX and run by ONNX Runtime, beside JAX."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("onnx", reason="needs onnx")
onnxruntime = pytest.importorskip("onnxruntime", reason="needs onnxruntime")
graph = importlib.import_module("hypjax.integrations.onnx_graph")
rules = importlib.import_module("hypjax.integrations.onnx_rules")
translate = rules.translate

X = np.random.default_rng(0).normal(size=(3, 8, 8, 4)).astype(np.float32)
W = np.random.default_rng(1).normal(size=(3, 3, 4, 6)).astype(np.float32)
V = np.random.default_rng(2).normal(size=(4, 5)).astype(np.float32)
_conv = jax.lax.conv_general_dilated
_pool = jax.lax.reduce_window
FUNCTIONS = {
    "convolutions": lambda x: (
        _conv(
            _conv(x, W, (2, 1), ((1, 0), (2, 1)), dimension_numbers=("NHWC", "HWIO", "NHWC")),
            W[:, :, :2, :].reshape(3, 3, 3, 4),
            (1, 1),
            "SAME",
            rhs_dilation=(1, 2),
            feature_group_count=2,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
        @ V
    ),
    "pointwise layers": lambda x: (
        jnp.clip(x @ V + 1, 0, 6) @ V.T * V[:, 0] - x.mean(axis=(1, 2), keepdims=True)
    ),
    "windows": lambda x: _pool(x, -jnp.inf, jax.lax.max, (1, 3, 2, 1), (1, 2, 1, 1), "SAME"),
    "axes": lambda x: jnp.pad(
        jax.lax.slice_in_dim(x[:, 1:7], 0, 8, 3, axis=2), ((0, 0), (1, 0), (0, 2), (0, 0))
    ).transpose(0, 3, 1, 2),
    "attention": lambda x: jax.nn.dot_product_attention(x, x[:, 1:] * 2, x[:, 1:]),
    "products": lambda x: jnp.einsum("bijc,bikc->bkj", x, x),
    "constants first": lambda x: jnp.einsum("hp,bhwc->bcpw", V.repeat(2, 0), x),
    "norms": lambda x: (
        (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-6)
    ),
    "softmax": lambda x: jax.nn.softmax(3 * x.swapaxes(1, 2), axis=-1).sum(axis=2),
    "shares that are no softmax": lambda x: (
        jnp.exp(x - X[:1]) / jnp.exp(x - X[:1]).sum(-1, keepdims=True)
    ),
    "shares of a difference": lambda x: (lambda e: e / e.sum(-1, keepdims=True))(
        jnp.exp(x - 2 * x**2)
    ),
    "constants in a batch": lambda x: jnp.einsum("bijc,ick->bijk", x, X[0, :, :4]),
    "sums of other axes": lambda x: x.sum(3).swapaxes(1, 2) / 4.0,
    "sums with an axis": lambda x: (
        jnp.expand_dims(x.sum(3).swapaxes(1, 2), 3) * jnp.ones((1, 1, 1, 4))
    ),
    "norms across": lambda x: x - x.mean(3).swapaxes(1, 2)[..., None] + x.sum(axis=()),
    "shares across": lambda x: (lambda e: e / e.sum(1, keepdims=True).swapaxes(1, 2))(jnp.exp(x)),
    "bounds": lambda x: jax.lax.clamp(
        jnp.broadcast_to(X[:1] - 0.1, x.shape), x, jnp.broadcast_to(X[:1] + 0.1, x.shape)
    ).swapaxes(1, 3),
    "large numbers": lambda x: jnp.log1p(jnp.abs(x) * 1e8),
    "small numbers": lambda x: jnp.log1p(jnp.abs(x) * 1e-6) + jnp.expm1(x * 1e-6),
    "functions": lambda x: (
        jnp.arctanh(jnp.tanh(x / 4)) + jnp.sinh(x) * jax.nn.silu(x) + jax.nn.gelu(x) ** 3
    ),
    "comparisons": lambda x: jnp.where(
        (x > 0.5) | ~(x != x) & (x <= -1), x, jnp.isfinite(1 / (x * 0))
    ),
    "maxima": lambda x: jnp.take_along_axis(x, x.argmax(axis=1, keepdims=True), axis=1)[:, 0],
    "stacks": lambda x: jnp.stack([x, x * 2], axis=2).reshape(x.shape[0], -1) @ jnp.ones((512, 3)),
    "repeats": lambda x: jnp.concatenate(
        [
            jnp.broadcast_to(V[None, None, :, :4], (x.shape[0], 1, 4, 4)),
            jnp.tile(x[:, :, :4], (1, 2, 1, 1)),
        ],
        axis=1,
    ),
    "loops": lambda x: jnp.polyval(jnp.asarray([1.0, -0.5, 0.25]), x),
}


def by_onnx(function, inputs, rows):
    example = jax.ShapeDtypeStruct(inputs.shape[1:], inputs.dtype)
    model = translate(function, example, "x", "y").SerializeToString()
    (result,) = onnxruntime.InferenceSession(model).run(None, {"x": inputs[:rows]})
    return result


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_batch_of_any_size_has_jax_s_results(name):
    function = FUNCTIONS[name]
    for rows in (3, 1):
        expected = np.asarray(function(jnp.asarray(X[:rows])))
        # Sums of convolutions are rounded like their largest terms.
        atol = max(2e-5, 1e-6 * np.abs(expected).max())
        np.testing.assert_allclose(by_onnx(function, X, rows), expected, rtol=2e-5, atol=atol)


@pytest.mark.parametrize("channels", [1, 3])
def test_channels_first_bytes_serve_what_needs_them_last(channels):
    images = np.random.default_rng(2).integers(0, 256, (2, 8, 8, channels), np.uint8)
    functions = (
        lambda x: (x.astype(jnp.float32) / 255) @ jnp.ones((channels, 4)),
        lambda x: x.astype(jnp.float32).mean((1, 2)),
        lambda x: x[:, 2:5, :, :1].astype(jnp.float32),
        lambda x: x.astype(jnp.float32).reshape(x.shape[0], -1),
    )
    for function in functions:
        expected = np.asarray(function(jnp.asarray(images)))
        np.testing.assert_allclose(by_onnx(function, images, 2), expected, rtol=1e-5)


def test_pixels_are_moved_channels_first_as_bytes():
    kernel = np.float32(np.random.default_rng(1).normal(size=(3, 3, 3, 4)))

    def convolve(images):
        pixels = (images.astype(jnp.float32) / 255 - 0.5) * jnp.float32([1, 2, 3])
        axes = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(pixels, kernel, (1, 1), "SAME", dimension_numbers=axes)

    images = np.random.default_rng(2).integers(0, 256, (2, 8, 8, 3), np.uint8)
    example = jax.ShapeDtypeStruct(images.shape[1:], images.dtype)
    first, *others = translate(convolve, example, "x", "y").graph.node
    assert first.op_type == "Transpose" and list(first.input) == ["x"]
    last = [node.op_type for node in others if node.op_type == "Transpose"]
    assert len(last) == 1  # To the order of the result.
    np.testing.assert_allclose(by_onnx(convolve, images, 2), convolve(images), atol=1e-5)


def test_small_numbers_keep_their_digits():
    x = np.float32([[1e-30, 1e-7, -1e-6, 1e-3, 0.5, 20.0, 0.0]])
    np.testing.assert_allclose(by_onnx(jnp.expm1, x, 1), np.expm1(x.astype(float)), rtol=3e-6)
    x = np.abs(x)
    np.testing.assert_allclose(by_onnx(jnp.log1p, x, 1), np.log1p(x.astype(float)), rtol=3e-6)


def test_rows_of_tables_are_looked_up():
    ids = np.int32([[0, 3, 2], [1, 1, 3]])
    table = np.float32(np.arange(8).reshape(4, 2))

    def last(ids):
        rows = jnp.take(table, ids - 1, axis=0, mode="clip")
        return jnp.take_along_axis(rows, jnp.argmax(ids, axis=1)[:, None, None], axis=1)[:, 0]

    np.testing.assert_array_equal(by_onnx(last, ids, 2), table[[2, 2]])


def test_weights_that_no_file_holds_are_refused(monkeypatch):
    monkeypatch.setattr(rules, "_LARGEST", V.nbytes)
    with pytest.raises(graph.UntranslatedError, match="holds 2 GB"):
        by_onnx(lambda x: x @ V, X, 3)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: jnp.sort(x, axis=1), "knows no sort"),
        (lambda x: jnp.take(V, x.argmax(1)[:, 0], axis=0), "indices in a way of its own"),
        (lambda x: x.argmax(1) & 3, "computes with bits"),
        (lambda x: x.astype(int), "makes int32 of float32"),
        (lambda x: x.argmax(1).astype(jnp.uint8), "makes uint8 of int32"),
        (lambda x: jnp.maximum(x @ jnp.where(V > 0, V, jnp.nan), 0), "not a number"),
        (lambda x: x.astype(jnp.bfloat16) * 2, "computes in bfloat16"),
        (lambda x: jnp.zeros(len(x)), "integer"),
        (lambda x: jax.lax.while_loop(lambda y: y.sum() > 0, lambda y: y - 1, x), "no while"),
    ],
)
def test_what_is_not_translated_is_named(function, reason):
    with pytest.raises(graph.UntranslatedError, match=reason):
        by_onnx(function, X, 3)
