"""Encoders by their names in timm."""

import difflib

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import PyTree

from hypjax.errors import UserError
from hypjax.models.layers import poolings
from hypjax.models.resnet import ResNet
from hypjax.models.vit import VisionTransformer

Encoder = VisionTransformer | ResNet

_SIZES = {"tiny": (192, 3), "small": (384, 6), "base": (768, 12)}  # Width, heads.
_TRANSFORMERS = (
    "vit_tiny_patch16_224",
    "vit_small_patch16_224",
    "vit_small_patch16_384",
    "vit_small_patch8_224",
    "vit_base_patch16_224",
    "vit_base_patch16_384",
    "vit_base_patch8_224",
    "deit_tiny_patch16_224",
    "deit_tiny_distilled_patch16_224",
    "deit_small_patch16_224",
    "deit_small_distilled_patch16_224",
    "deit_base_patch16_224",
    "deit_base_patch16_384",
    "deit_base_distilled_patch16_224",
    "deit_base_distilled_patch16_384",
)
_RESNETS = {"resnet50": (3, 4, 6, 3), "resnet101": (3, 4, 23, 3)}  # Bottlenecks by stage.
_MOST_PATCHES = 128  # Along a side.
ARCHITECTURES = (*_TRANSFORMERS, *_RESNETS)


def create_encoder(
    timm_name: str,
    *,
    image_size: int | None = None,
    pooling: str | None = None,
    dtype: DTypeLike = jnp.float32,
    remat: bool = False,
) -> Encoder:
    """Builds the encoder that has a given name in timm.

    Args:
        timm_name: One of `ARCHITECTURES`, without the tag of pretrained weights.
        image_size: Side of the images in pixels, or None for the size in the name.
        pooling: How tokens are pooled, see `hypjax.models.layers.poolings`. None pools as timm
            does: the class token, the mean of the class and distillation tokens of a distilled
            model, or the average over the positions of a ResNet.
        dtype: Dtype of matrix products and convolutions.
        remat: Whether to recompute the activations of blocks in the backward pass.

    Returns:
        A Flax module that maps images [batch, height, width, channels] to embeddings [batch, dim].
    """
    if timm_name not in ARCHITECTURES:
        words = supported(timm_name)
        raise UserError(f"unknown architecture {timm_name!r}; it must be {words}")
    options = {"dtype": dtype, "remat": remat}
    if timm_name in _RESNETS:
        encoder = ResNet(
            image_size or 224, _RESNETS[timm_name], pooling=pooling or "avg", **options
        )
        return check_encoder(encoder)
    _, size, *distilled, patch_size, native_size = timm_name.split("_")
    width, num_heads = _SIZES[size]
    encoder = VisionTransformer(
        image_size=image_size or int(native_size),
        patch_size=int(patch_size.removeprefix("patch")),
        width=width,
        depth=12,
        num_heads=num_heads,
        distilled=bool(distilled),
        pooling=pooling or ("cls_dist_mean" if distilled else "cls"),
        **options,
    )
    return check_encoder(encoder)


def supported(name: str) -> str:
    """Lists the supported architectures for a message, those most similar to a name first."""
    *others, last = difflib.get_close_matches(name, ARCHITECTURES, len(ARCHITECTURES), cutoff=0)
    return f"{', '.join(others)} or {last}"


def check_encoder(encoder: Encoder) -> Encoder:
    """Returns an encoder after checking its image size and pooling."""
    names = poolings(encoder.num_prefix_tokens)
    if encoder.pooling not in names:
        raise UserError(
            f"the encoder cannot pool by {encoder.pooling!r}; choose among {', '.join(names)}"
        )
    patch_size = getattr(encoder, "patch_size", 1)
    if encoder.image_size % patch_size:
        raise UserError(
            f"images of {encoder.image_size} pixels cannot be cut into patches of {patch_size}; "
            f"choose a multiple of {patch_size} as data.image_size"
        )
    side = encoder.image_size // patch_size
    if patch_size > 1 and side > _MOST_PATCHES:
        raise UserError(
            f"images of {encoder.image_size} pixels have {side} × {side} patches of {patch_size}, "
            f"and the encoder takes at most {_MOST_PATCHES} × {_MOST_PATCHES}; choose a smaller "
            "data.image_size, or larger patches"
        )
    return encoder


def same_architecture(one: Encoder, other: Encoder) -> bool:
    """Whether two encoders have the same parameters but for those that an image size decides."""
    names = ("image_size", "pooling", "dtype", "remat", "tensor_cores", "attention")
    ignored = {name: getattr(other, name) for name in names if hasattr(other, name)}
    return type(one) is type(other) and one.clone(**ignored) == other


def encoder_shapes(encoder: Encoder, channels: int = 3) -> PyTree:
    """A tree of `jax.ShapeDtypeStruct` of an encoder's parameters, without computing them."""
    side = encoder.image_size
    images = jax.ShapeDtypeStruct((1, side, side, channels), jnp.float32)
    return jax.eval_shape(encoder.init, jax.random.key(0), images)["params"]
