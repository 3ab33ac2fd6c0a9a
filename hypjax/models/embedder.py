"""Encoder and head: images to the two vectors that objectives and evaluation use."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float, PyTree
from ml_collections import ConfigDict

from hypjax.models.architectures import Encoder, checked, create_encoder
from hypjax.models.precision import compute_dtype
from hypjax.models.vit import VisionTransformer
from hypjax.types import Outputs, View


class Embedder(nn.Module):
    """An encoder, and a head that maps its embedding to fewer coordinates.

    The head is one float32 Dense layer with a semi-orthogonal kernel and bias 0 (Hyp-ViT,
    Section 3.2); what it returns lies in no space yet.

    Attributes:
        encoder: Module that maps normalised images to embeddings.
        head_dim: Coordinates of the head's output.
    """

    encoder: Encoder
    head_dim: int

    @nn.compact
    def __call__(self, images: Float[ArrayLike, "batch height width channels"]) -> Outputs:
        """Embeds normalised images."""
        pooled = self.encoder(images).astype(jnp.float32)
        head = nn.Dense(
            self.head_dim,
            kernel_init=nn.initializers.orthogonal(),
            precision=jax.lax.Precision.HIGHEST,
            name="head",
        )
        return Outputs(pooled=pooled, projected=head(pooled))


def create_embedder(config: ConfigDict, *, evaluating: bool = False) -> Embedder:
    """Builds the model that a run's configuration describes.

    Args:
        config: The run's whole configuration, already validated.
        evaluating: Pool by `model.eval_pooling` and not as in training; parameters are the same.

    Raises:
        UserError: The architecture is unknown, or image size or pooling do not fit it.
    """
    model = config.model
    pooling = model.eval_pooling if evaluating else model.pooling
    dtype = compute_dtype(model.precision)
    if model.architecture != "vit":
        encoder = create_encoder(
            model.architecture,
            image_size=config.data.image_size,
            pooling=pooling,
            dtype=dtype,
            remat=config.run.remat,
        )
        return Embedder(encoder=encoder, head_dim=model.head_dim)
    encoder = VisionTransformer(
        image_size=config.data.image_size,
        patch_size=model.patch_size,
        width=model.width,
        depth=model.depth,
        num_heads=model.num_heads,
        pooling=pooling,
        dtype=dtype,
        remat=config.run.remat,
    )
    return Embedder(encoder=checked(encoder), head_dim=model.head_dim)


def example_images(view: View) -> Float[Array, "1 side side channels"]:
    """One black image, to initialise a model with."""
    return jnp.zeros((1, view.side, view.side, view.channels))


def model_shapes(model: Embedder, view: View) -> PyTree:
    """Shapes and dtypes of a model's parameters, without computing any."""
    return jax.eval_shape(model.init, jax.random.key(0), example_images(view))["params"]
