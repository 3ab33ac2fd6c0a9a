"""What every encoder has: a module that maps images to embeddings, and its tensors' names."""

from collections.abc import Iterator
from typing import Any

import flax.linen as nn
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from hypjax.models.layers import poolings
from hypjax.models.tensors import Tensor


class Encoder(nn.Module):
    """Maps images to one embedding each, pooled from tokens.

    A subclass has the attributes `image_size` in pixels, `pooling`, `dtype`, which is that of its
    products, and `remat`. It defines `dim`, `classifiers`, `layers`, `tensors` and `__call__`.
    Parameters and results are float32.
    """

    @property
    def dim(self) -> int:
        """Dimension of the embedding."""
        raise NotImplementedError

    @property
    def num_prefix_tokens(self) -> int:
        """Number of tokens before those of patches or of positions of a feature map."""
        return 0

    @property
    def poolings(self) -> list[str]:
        """Names of the poolings that the encoder supports, see `hypjax.models.layers.poolings`."""
        return poolings(0)

    @property
    def classifiers(self) -> tuple[str, ...]:
        """Names in timm of the layers that follow the embedding."""
        raise NotImplementedError

    @property
    def layers(self) -> list[tuple[str, ...]]:
        """Names of the parameters of each layer, from the images to the embedding, as in timm.

        Parameters of no layer belong with the head, above all layers.
        """
        raise NotImplementedError

    def tensors(self) -> Iterator[Tensor]:
        """The parameters, by timm's names."""
        raise NotImplementedError

    def __call__(
        self,
        images: Float[ArrayLike, "batch height width channels"],
        return_tokens: bool = False,
        **options: Any,
    ) -> Float[Array, "batch dim"] | Float[Array, "batch tokens dim"]:
        """Embeds normalised pixels; with `return_tokens` it returns timm's `forward_features`."""
        raise NotImplementedError
