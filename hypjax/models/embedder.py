"""The model: towers of an encoder and a head, which map images to an objective's inputs."""

import dataclasses
import math
from collections.abc import Mapping

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.core import FrozenDict
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float, PRNGKeyArray, PyTree, Shaped

from hypjax.geometry import arithmetic
from hypjax.geometry.learned import Scalars, initial_parameters
from hypjax.models.architectures import UNSIZED, check_encoder, create_encoder, create_unsized
from hypjax.models.custom import CUSTOM_ENCODERS, CustomEncoder, custom_encoder
from hypjax.models.encoder import FEATURES, ConvNet, Encoder, FeatureEncoder
from hypjax.models.layers import compute_dtype, on_tensor_cores, residual_dtype
from hypjax.models.text import create_text_encoder
from hypjax.models.vit import VisionTransformer
from hypjax.settings import EncoderSettings, ModelSettings, TextSettings
from hypjax.types import IMAGES, CachedFeatures, Outputs, View


class Embedder(nn.Module):
    """The tower of images: an encoder, and a head that maps its embedding to a lower dimension.

    `head_kind` is "dense", a float32 Dense layer, initialised with a semi-orthogonal kernel and
    zero bias (Hyp-ViT, Section 3.2); "norm_dense", a LayerNorm without parameters (ε = 1e-5, as in
    HIER's code) and then this layer; "linear", a Dense layer without bias, as in CLIP and MERU; or
    "none" (IRT), with the encoder's dimension as `head_dim`. The head's output is not yet embedded
    in a space. With `max_norm` m, an output v is shortened to v·m/(m + ‖v‖), shorter than m.

    `towers` embed further inputs, such as texts: their encoders take these, and their parameters
    lie below "towers_NAME".
    """

    encoder: Encoder
    head_dim: int
    head_kind: str = "dense"
    towers: Mapping[str, "Embedder"] = FrozenDict()
    max_norm: float | None = None

    def setup(self) -> None:
        """Declares the head."""
        if self.head_kind == "none":
            return
        if self.head_kind == "norm_dense":
            self.norm = nn.LayerNorm(
                epsilon=1e-5, use_bias=False, use_scale=False, use_fast_variance=False
            )
        init: nn.initializers.Initializer = nn.initializers.orthogonal()
        if self.head_kind == "linear":
            init = nn.initializers.normal(self.encoder.dim**-0.5)
        self.head = nn.Dense(
            self.head_dim,
            use_bias=self.head_kind != "linear",
            kernel_init=init,
            precision=jax.lax.Precision.HIGHEST,
        )

    def __call__(
        self,
        inputs: Shaped[ArrayLike, "batch ..."],
        drop_path_masks: Float[Array, "batch depth 2"] | None = None,
    ) -> Outputs:
        """Embeds normalised pixels or tokens; only a `VisionTransformer` takes masks."""
        if drop_path_masks is None:
            return self.project(self.encoder(inputs).astype(jnp.float32))
        pooled = self.encoder(inputs, drop_path_masks=drop_path_masks)
        return self.project(pooled.astype(jnp.float32))

    def project(self, pooled: Float[ArrayLike, "*batch encoder_dim"]) -> Outputs:
        """Applies the head to the encoder's embeddings."""
        pooled = jnp.asarray(pooled)
        features = self.norm(pooled) if self.head_kind == "norm_dense" else pooled
        projected = features if self.head_kind == "none" else self.head(features)
        if self.max_norm is not None:
            # A clip would leave entailment no gradient by which to shorten a text.
            length = arithmetic.sqrt(arithmetic.square_norm(projected))
            projected = projected * self.max_norm / (self.max_norm + length)
        return Outputs(pooled=pooled, projected=projected)

    def embed(
        self,
        inputs: Mapping[str, PyTree],
        drop_path_masks: Float[Array, "batch depth 2"] | None = None,
    ) -> dict[str, Outputs]:
        """Embeds what each tower takes; images may be the encoder's embeddings, cached."""
        images = inputs[IMAGES]
        is_cached = isinstance(images, CachedFeatures)
        outputs = self.project(images.values) if is_cached else self(images, drop_path_masks)
        others = {name: tower(inputs[name]) for name, tower in self.towers.items()}
        return {IMAGES: outputs, **others}

    def initial_parameters(self, key: PRNGKeyArray, view: View) -> PyTree:
        """Random parameters of all towers."""
        encoders = {IMAGES: self.encoder} | {name: x.encoder for name, x in self.towers.items()}
        examples = {name: encoder.example(view) for name, encoder in encoders.items()}
        return self.init(key, examples, method="embed")["params"]


def create_embedder(settings: ModelSettings, device: jax.Device | None = None) -> Embedder:
    """Builds a model for a device, by default JAX's first."""
    encoder = _create_encoder(settings.encoder, device)
    dim = encoder.dim if settings.head == "none" else settings.head_dim
    towers = {name: create_embedder(tower, device) for name, tower in settings.towers.items()}
    return Embedder(encoder, dim, settings.head, FrozenDict(towers), settings.max_norm)


def _create_encoder(settings: EncoderSettings | TextSettings, device: jax.Device | None) -> Encoder:
    if isinstance(settings, TextSettings):
        return create_text_encoder(settings, device)
    architecture = settings.architecture
    if architecture == FEATURES:
        return FeatureEncoder(settings.width)
    if architecture in CUSTOM_ENCODERS:
        encoder = custom_encoder(architecture, settings.view)
    elif architecture in UNSIZED:
        encoder = create_unsized(settings)
    else:
        side, pool_first = settings.view.side, settings.pool_first
        encoder = create_encoder(architecture, image_size=side, pool_first=pool_first)
    if isinstance(encoder, CustomEncoder):
        return encoder
    dtype = compute_dtype(settings.precision, device)
    encoder = encoder.clone(pooling=settings.pooling, dtype=dtype, remat=settings.remat)
    if isinstance(encoder, VisionTransformer | ConvNet):
        encoder = encoder.clone(gem_exponent=settings.gem_exponent, learn_gem=settings.learn_gem)
    if isinstance(encoder, VisionTransformer):
        tensor_cores = on_tensor_cores(dtype, device)
        attention = settings.attention if tensor_cores else "xla"
        blocks = dataclasses.replace(
            encoder.blocks,
            norm_eps=settings.norm_eps or encoder.blocks.norm_eps,
            activation=settings.activation or encoder.blocks.activation,
        )
        encoder = encoder.clone(tensor_cores=tensor_cores, attention=attention, blocks=blocks)
        encoder = encoder.clone(residual=residual_dtype(settings.residual, dtype))
    return check_encoder(encoder)


def in_precision(model: Embedder, dtype: DTypeLike) -> Embedder:
    """Changes the dtype of the products of an encoder, unless it wraps a Flax module."""
    encoder = model.encoder
    if isinstance(encoder, CustomEncoder | FeatureEncoder):
        return model
    if getattr(encoder, "residual", jnp.float32) != jnp.float32:
        encoder = encoder.clone(residual=dtype)
    return model.clone(encoder=encoder.clone(dtype=dtype))


def pooled_by(model: Embedder, pooling: str) -> Embedder:
    """Changes a model's pooling, unless its encoder wraps a Flax module or takes features."""
    encoder = model.encoder
    if isinstance(encoder, CustomEncoder | FeatureEncoder):
        return model
    return model.clone(encoder=check_encoder(encoder.clone(pooling=pooling)))


def model_shapes(model: Embedder, view: View, scalars: Scalars | None = None) -> PyTree:
    """Shapes of a model's parameters and learned scalars, a tree of `jax.ShapeDtypeStruct`."""
    params = jax.eval_shape(lambda key: model.initial_parameters(key, view), jax.random.key(0))
    return params | jax.eval_shape(lambda: initial_parameters(scalars or {}))


def scaled_side(encoder: Encoder, scale: float) -> int:
    """Side of images at a scale of `encoder.image_size`, in pixels; halves are rounded up."""
    patch = getattr(encoder, "patch_size", 1)  # Position embeddings require whole patches.
    return patch * max(1, math.floor(encoder.image_size * scale / patch + 0.5))


def at_side(model: Embedder, params: PyTree, side: int) -> tuple[Embedder, PyTree]:
    """Adapts a model to images of another side, in pixels, by interpolating position embeddings."""
    encoder = check_encoder(model.encoder.clone(image_size=side))
    if isinstance(encoder, VisionTransformer) and "pos_embed" in params["encoder"]:
        resized = encoder.resized(params["encoder"]["pos_embed"])
        params = {**params, "encoder": {**params["encoder"], "pos_embed": resized}}
    return model.clone(encoder=encoder), params
