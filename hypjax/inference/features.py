"""Features: the encoder's embeddings of images under the test view, before any normalisation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree
from ml_collections import ConfigDict

from hypjax import parallel
from hypjax.config import validate
from hypjax.data.dataset import Dataset
from hypjax.data.splits import open_splits
from hypjax.errors import UserError
from hypjax.inference.datasets import EvaluationInput, embed_dataset, evaluation_input
from hypjax.inference.embedding import ONE_SCALE, PixelScaling
from hypjax.inference.weights import pretrained_encoder
from hypjax.models import create_embedder
from hypjax.models.architectures import Encoder
from hypjax.models.normalize import normalize
from hypjax.system import memory


def pretrained_features(
    config: ConfigDict,
) -> tuple[Float[np.ndarray, "images dim"], tuple[str, ...]]:
    """Embeds the training images with the encoder that `model.weights` names.

    As in Hyp-ViT's Table 1, the features are not normalised, and a centre crop cuts nothing off the
    shorter side, whatever `data.resize` says.

    Returns:
        The features, and the notes that every result computed from these images must carry.

    Raises:
        UserError: There are no such weights, the images cannot be read, or `eval.scales` names
            several scales, of which these features, unlike points of a space, have no mean.
    """
    validate(config)
    if tuple(config.eval.scales) != ONE_SCALE:
        raise UserError(
            f"config.eval.scales is {config.eval.scales}, but the encoder's features are measured "
            "at one scale; set --config.eval.scales=1, or measure a gallery with --embeddings"
        )
    encoder = create_embedder(config, evaluating=True).encoder
    splits = open_splits(config)
    train, source = splits.training_images(), evaluation_input(config)
    source = source._replace(view=source.view._replace(resize=source.view.side))
    params = pretrained_encoder(config, encoder)
    scaling = (config.data.mean, config.data.std)
    return encoder_features(encoder, params, train, source, scaling), splits.notes


def encoder_features(
    encoder: Encoder,
    params: PyTree,
    dataset: Dataset,
    source: EvaluationInput,
    pixel_scaling: PixelScaling,
) -> Float[np.ndarray, "images dim"]:
    """Embeds all images of a dataset with an encoder.

    Args:
        encoder: The encoder.
        params: Its parameters.
        dataset: The images.
        source: View, workers, batch size and devices.
        pixel_scaling: Mean and standard deviation of pixels.

    Raises:
        UserError: An image cannot be read, or the device's memory does not suffice.
    """

    def embed(params: PyTree, images: Array) -> Array:
        images = normalize(images, *pixel_scaling)
        return encoder.apply({"params": params}, images).astype(jnp.float32)

    params = parallel.place(params, parallel.replicated(source.mesh))
    embed_batch = functools.partial(jax.jit(parallel.map_images(embed, source.mesh)), params)
    with memory.explained("run.eval_batch_size"):
        return embed_dataset(embed_batch, dataset, source)
