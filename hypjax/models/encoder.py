"""What every encoder has: a module that maps images to embeddings, and its tensors' names."""

from collections.abc import Iterator

import flax.linen as nn
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from hypjax.models.layers import poolings
from hypjax.models.tensors import Tensor
from hypjax.types import View

FEATURES = "features"  # Architecture of `FeatureEncoder`.


class Encoder(nn.Module):
    """Maps images to one embedding each, pooled from tokens; parameters and results are float32.

    A subclass has these attributes:

    - `image_size`: side of the images in pixels, or height and width,
    - `pooling`: one of its `poolings`,
    - `dtype`: that of its products,
    - `remat`: whether the backward pass recomputes activations,

    these properties:

    - `dim`: dimension of the embedding,
    - `classifiers`: names in timm of the layers that follow the embedding,
    - `layers`: names of the parameters of each layer, from the images to the embedding, as in timm;
      parameters of no layer belong with the head, above all layers,

    and these methods:

    - `tensors()` yields a `hypjax.models.tensors.Tensor` for each parameter,
    - `__call__(images, return_tokens=False)` embeds normalised pixels [batch, height, width,
      channels] to [batch, dim]; with `return_tokens` it returns timm's `forward_features`, as
      [batch, tokens, dim].
    """

    takes_pixels = True  # Or embeddings of another model.
    num_prefix_tokens = 0  # Tokens before those of patches or of positions of a feature map.

    def example(self, view: View) -> Float[Array, "1 ..."]:
        """A float32 batch of one all-zero image, with which a model can be initialised."""
        return jnp.zeros((1, view.side, view.side, view.channels))

    @property
    def poolings(self) -> list[str]:
        """Names of the poolings that the encoder supports, see `hypjax.models.layers.poolings`."""
        return poolings(0)


class FeatureEncoder(Encoder):
    """Stands for a model whose embeddings are given: it returns them as they are.

    Attributes:
        dim: Dimension of the embeddings.
    """

    dim: int
    takes_pixels = False
    classifiers = ()
    layers = ()

    def example(self, view: View) -> Float[Array, "1 dim"]:
        """A float32 batch of one all-zero embedding."""
        del view
        return jnp.zeros((1, self.dim))

    def tensors(self) -> Iterator[Tensor]:
        """There are no parameters."""
        return iter(())

    def __call__(self, features: Float[ArrayLike, "batch dim"]) -> Float[ArrayLike, "batch dim"]:
        """Returns the embeddings."""
        return features
