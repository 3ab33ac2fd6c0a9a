"""Features of a pretrained encoder, before any training."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree
from ml_collections import ConfigDict

from hypjax import parallel
from hypjax.config import validate
from hypjax.data.splits import open_splits
from hypjax.inference.datasets import embed_dataset, evaluation_input
from hypjax.inference.weights import pretrained_encoder
from hypjax.models import create_embedder
from hypjax.models.normalize import normalize
from hypjax.system import memory


def pretrained_features(
    config: ConfigDict,
) -> tuple[Float[np.ndarray, "images dim"], tuple[str, ...]]:
    """Embeds the training images with the encoder that `model.weights` names.

    As in Hyp-ViT's Table 1, the features are not normalised, and the test view cuts nothing off the
    shorter side, whatever `data.resize` says.

    Returns:
        The features, and the notes that every result computed from these images must carry.

    Raises:
        UserError: There are no such weights, or the images cannot be read.
    """
    validate(config)
    encoder = create_embedder(config, evaluating=True).encoder
    splits = open_splits(config)
    source = evaluation_input(config)
    source = source._replace(view=source.view._replace(shorter_side=source.view.side))
    params = pretrained_encoder(config, encoder)
    params = parallel.place(params, parallel.replicated(source.mesh))

    def embed(params: PyTree, images: Array) -> Array:
        images = normalize(images, config.data.mean, config.data.std)
        return encoder.apply({"params": params}, images).astype(jnp.float32)

    embed_batch = functools.partial(jax.jit(parallel.map_images(embed, source.mesh)), params)
    with memory.explained("run.eval_batch_size"):
        return embed_dataset(embed_batch, splits.train, source), splits.notes
