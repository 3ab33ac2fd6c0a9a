"""The Vision Transformer and the head."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hypjax.config import load_config
from hypjax.models import Embedder, VisionTransformer, create_embedder

SMALL = dict(image_size=16, patch_size=8, width=24, depth=2, num_heads=3)
images = np.random.default_rng(0).normal(size=(3, 16, 24, 3)).astype(np.float32)


@pytest.fixture(scope="module")
def params():
    return VisionTransformer(**SMALL).init(jax.random.key(0), images)["params"]


def test_embedding_is_the_class_token(params):
    encoder = VisionTransformer(**SMALL)
    tokens = encoder.apply({"params": params}, images, return_tokens=True)
    assert tokens.shape == (3, 1 + 2 * 3, 24) and tokens.dtype == jnp.float32
    np.testing.assert_array_equal(encoder.apply({"params": params}, images), tokens[:, 0])


def test_embedding_does_not_depend_on_the_batch(params):
    encoder = VisionTransformer(**SMALL)
    together = encoder.apply({"params": params}, images)
    alone = encoder.apply({"params": params}, images[1:2])
    np.testing.assert_allclose(together[1:2], alone, atol=1e-5)


def test_patches_match_their_position_embeddings(params):
    """Moving a patch together with its position embedding does not change the set of tokens."""
    changed = images.copy()
    changed[:, :8, :8], changed[:, 8:, 16:] = images[:, 8:, 16:], images[:, :8, :8]
    order = jnp.array([0, 6, 2, 3, 4, 5, 1])
    moved = params | {"pos_embed": params["pos_embed"][:, order]}
    encoder = VisionTransformer(**SMALL)
    np.testing.assert_allclose(
        encoder.apply({"params": params}, images),
        encoder.apply({"params": moved}, changed),
        atol=1e-5,
    )


def test_bfloat16_keeps_parameters_and_results_in_float32(params):
    half = VisionTransformer(**SMALL, dtype=jnp.bfloat16)
    initial = half.init(jax.random.key(0), images)["params"]
    assert {x.dtype for x in jax.tree.leaves(initial)} == {jnp.dtype("float32")}
    embedded = half.apply({"params": params}, images)
    full = VisionTransformer(**SMALL).apply({"params": params}, images)
    assert embedded.dtype == jnp.float32
    error = np.linalg.norm(embedded - full) / np.linalg.norm(full)
    assert 0 < error < 2e-2


def test_head_starts_with_a_semi_orthogonal_kernel_and_zero_bias():
    model = Embedder(VisionTransformer(**SMALL), head_dim=10)
    params = model.init(jax.random.key(0), images)["params"]
    kernel = params["head"]["kernel"]
    np.testing.assert_allclose(kernel.T @ kernel, np.eye(10), atol=1e-5)
    assert not params["head"]["bias"].any()
    outputs = model.apply({"params": params}, images)
    np.testing.assert_allclose(outputs.projected, outputs.pooled @ kernel, atol=1e-5)


def test_configuration_sets_the_sizes_of_the_model(repository):
    overrides = ["model.width=24", "model.depth=3", "model.num_heads=2", "model.head_dim=7"]
    config = load_config(str(repository / "configs/glyphs.py"), overrides)
    model = create_embedder(config)
    outputs, variables = jax.eval_shape(
        lambda: model.init_with_output(jax.random.key(0), jnp.zeros((2, 32, 32, 1)))
    )
    assert outputs.pooled.shape == (2, 24) and outputs.projected.shape == (2, 7)
    assert {f"block_{i}" for i in range(3)} <= variables["params"]["encoder"].keys()


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [("auto", jnp.float32), ("float32", jnp.float32), ("bfloat16", jnp.bfloat16)],
)
def test_default_precision_on_cpus_is_float32(repository, precision, dtype):
    config = load_config(str(repository / "configs/glyphs.py"), [f"model.precision={precision}"])
    if jax.default_backend() != "cpu" and precision == "auto":
        dtype = jnp.bfloat16
    assert create_embedder(config).encoder.dtype == dtype
