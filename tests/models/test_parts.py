"""Transformers whose blocks gather their parameters embed, and learn, as with whole parameters."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from hypjax.models.parts import Part, gather
from hypjax.models.vit import VisionTransformer, draw_drop_path_masks


def in_parts(function):
    """The function on a mesh of one device, whose part of each block is the whole block."""
    mesh = Mesh(np.array(jax.devices()[:1]), "parts")

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    def local(params):
        cut = jax.tree.map(lambda x: Part(x, 0, "parts"), params)
        return function({name: x if "block" in name else gather(x) for name, x in cut.items()})

    return local


@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("depth", [1, 3])
def test_blocks_in_parts_have_the_same_output_and_gradient(depth, remat):
    encoder = VisionTransformer(16, 8, 16, depth, 2, remat=remat)
    images = jax.random.normal(jax.random.key(0), (4, 16, 16, 3))
    masks = draw_drop_path_masks(jax.random.key(1), 0.5, depth, len(images))
    params = encoder.init(jax.random.key(2), images)["params"]

    def embed(params):
        return encoder.apply({"params": params}, images, drop_path_masks=masks)

    def with_gradient(embed):
        return jax.jit(jax.value_and_grad(lambda x: jnp.sum(jnp.sin(3 * embed(x)))))(params)

    for actual, expected in zip(
        jax.tree.leaves(with_gradient(in_parts(embed))),
        jax.tree.leaves(with_gradient(embed)),
        strict=True,
    ):
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


def test_the_gradient_computes_no_product_again():
    # Of two blocks, one is a loop's body, so that each product is written down once.
    encoder = VisionTransformer(16, 8, 16, 2, 2)
    images = jnp.ones((4, 16, 16, 3))
    params = jax.eval_shape(encoder.init, jax.random.key(0), images)["params"]

    def loss(params):
        return jnp.sum(encoder.apply({"params": params}, images))

    def products(function):
        return jax.jit(jax.grad(function)).lower(params).as_text().count("stablehlo.dot_general")

    assert products(in_parts(loss)) == products(loss)
