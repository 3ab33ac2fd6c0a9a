"""Programs of evaluation, compiled for devices that need not exist."""

import jax
import jax.numpy as jnp

from hypjax import parallel
from hypjax.benchmarks.programs import describe
from hypjax.inference.embedding import embed_function, scored_spaces
from hypjax.models import create_embedder


def compiled_embedding(config, mesh):
    """Compiles the embedding of a batch, as evaluation runs it."""
    model = create_embedder(config, evaluating=True, device=mesh.devices.flat[0])
    embed = embed_function(model, (config.data.mean, config.data.std), scored_spaces(config))
    rows = parallel.slices(config.run.eval_batch_size, mesh).rows
    shape = config.data.image_size, config.data.image_size, config.data.channels
    images = jax.ShapeDtypeStruct((rows, *shape), jnp.uint8, sharding=parallel.sharded(mesh))
    example = jax.ShapeDtypeStruct((1, *shape), jnp.float32)
    params = jax.eval_shape(model.init, jax.random.key(0), example)["params"]
    params = jax.tree.map(lambda x: x.update(sharding=parallel.replicated(mesh)), params)
    return describe(jax.jit(parallel.map_images(embed, mesh)).lower(params, images))
