"""Base classes of encoders: modules that map images to embeddings, and name their tensors."""

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TypeAlias

import flax.linen as nn
import jax.numpy as jnp
from einops import rearrange
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float, Shaped

from hypjax.models.layers import GEM_EXPONENT, FeatureMap, full_products_in, pool_tokens, poolings
from hypjax.types import View

FEATURES = "features"  # Architecture of `FeatureEncoder`.
Path: TypeAlias = tuple[str, ...]  # Path of a parameter in the encoder's tree.
# Pairs for `re.sub`, see `renamed`.
Names: TypeAlias = Iterable[tuple[str, str | Callable[[re.Match[str]], str]]]


class Encoder(nn.Module):
    """Maps each image to an embedding pooled from tokens; parameters and results are float32.

    A subclass has these attributes:

    - `image_size`: side of the images in pixels, or height and width,
    - `pooling`: one of its `poolings`,
    - `dtype`: the dtype of its matrix products,
    - `remat`: whether the backward pass recomputes activations,

    these class attributes or properties:

    - `dim`: dimension of the embedding,
    - `classifiers`: names in timm of the layers that follow the embedding,
    - `layers`: names of the parameters of each layer, from the images to the embedding, as in timm;
      parameters that are in no layer count as part of the head, above all layers,
    - where timm has other names and layouts, `names` and `patches`,

    and `__call__(images, return_tokens=False)`, which embeds normalised pixels [batch, height,
    width, channels] as [batch, dim]; with `return_tokens` it returns timm's `forward_features`, as
    [batch, tokens, dim].
    """

    gem_exponent = GEM_EXPONENT  # Exponent of the pooling "gem".
    learn_gem = False  # Whether this exponent is a parameter.
    takes_pixels = True  # False if the inputs are texts, or embeddings of another model.

    @property
    def gathers(self) -> Collection[str]:
        """Names of parameters that the encoder gathers by itself, if devices hold parts of them."""
        return ()

    @property
    def pool_first(self) -> bool | None:
        """Whether the final norm of a Transformer follows the pooling."""
        return None

    @property
    def num_prefix_tokens(self) -> int:
        """Number of tokens before the patches, or before the positions of a feature map."""
        return 0

    @property
    def names(self) -> Names | None:
        """Pairs for `re.sub` that turn a path, such as 'block_0.fc_1.weight', into timm's name.

        None for a user's module, whose parameters keep their paths and layouts.
        """
        return None

    @property
    def patches(self) -> Mapping[str, int]:
        """Modules that are dense here but convolutions in timm, with the sides of the kernels."""
        return {}

    def example(self, view: View) -> Shaped[Array, "1 ..."]:
        """A float32 batch of one zero image, for initialising a model."""
        return jnp.zeros((1, view.side, view.side, view.channels))

    @property
    def sides(self) -> tuple[int, int]:
        """Height and width of the images, in pixels."""
        return (self.image_size,) * 2 if isinstance(self.image_size, int) else self.image_size

    @property
    def poolings(self) -> Sequence[str]:
        """Names of the poolings that the encoder supports, see `hypjax.models.layers.poolings`."""
        return poolings(0)

    def pool(self, tokens: Float[Array, "batch tokens dim"]) -> Float[Array, "batch dim"]:
        """Pools tokens; with `learn_gem`, the exponent of `gem` is a parameter."""
        exponent: float | Array = self.gem_exponent
        if self.learn_gem:
            exponent = self.param("gem_exponent", nn.initializers.constant(exponent), ())
        return pool_tokens(tokens, self.num_prefix_tokens, self.pooling, exponent)


def renamed(name: str, table: Names) -> str:
    """Applies all (pattern, replacement) pairs of a table to a name, in order."""
    for pattern, replacement in table:
        name = re.sub(pattern, replacement, name)
    return name


class ConvNet(Encoder):
    """Convolutional encoder: a stem, stages of residual blocks, and pooling of the last features.

    A subclass defines `depths`, the number of blocks in each stage, and the methods `_stem(x)` and
    `_block(x, stage, i)`, which applies block `i` of a stage. Activations within blocks have the
    products' `dtype`; float32 products are true float32 on every device.
    """

    image_size: int
    pooling: str = "avg"
    dtype: DTypeLike = jnp.float32
    remat: bool = False
    gem_exponent: float = GEM_EXPONENT
    learn_gem: bool = False

    @property
    def layers(self) -> list[Path]:
        """The stem, then the blocks; downsampling and head convolutions belong to a block."""
        layers: list[Path] = [("stem_conv", "stem_norm")]
        for stage, depth in enumerate(self.depths):
            layers.append((f"stage_{stage}_downsample", f"stage_{stage}_block_0"))
            layers += [(f"stage_{stage}_block_{i}",) for i in range(1, depth)]
        layers[-1] += ("head_conv", "head_norm")
        return layers

    @nn.compact
    def __call__(
        self, images: Float[ArrayLike, "batch height width channels"], return_tokens: bool = False
    ) -> Float[Array, "batch dim"] | Float[Array, "batch positions dim"]:
        """Embeds normalised pixels, in float32; `return_tokens` returns the last feature map."""
        with full_products_in(self.dtype):
            x = self._stem(jnp.asarray(images))
            for stage, depth in enumerate(self.depths):
                for i in range(depth):
                    x = self._block(x, stage, i)
            x = self._top(x)
        tokens = rearrange(x, "b h w c -> b (h w) c").astype(jnp.float32)
        return tokens if return_tokens else self._pooled(tokens)

    def _top(self, x: FeatureMap) -> Array:
        """The layers after the last stage; none by default."""
        return x

    def _pooled(self, tokens: Float[Array, "batch positions dim"]) -> Float[Array, "batch dim"]:
        """The embedding; a subclass may add layers after the pooling."""
        return self.pool(tokens)


class FeatureEncoder(Encoder):
    """Encoder of precomputed features, the embeddings of another model, which it returns."""

    dim: int
    takes_pixels = False
    classifiers = ("head",)
    layers = ()

    def example(self, view: View) -> Float[Array, "1 dim"]:
        """A float32 batch of one zero embedding."""
        return jnp.zeros((1, self.dim))

    def __call__(self, features: Float[ArrayLike, "*batch dim"]) -> Float[ArrayLike, "*batch dim"]:
        """Returns the embeddings."""
        return features
