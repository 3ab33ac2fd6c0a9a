"""Encoders by timm's names."""

import difflib

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import PyTree

from hypjax.errors import UserError
from hypjax.models.pooling import poolings
from hypjax.models.resnet import ResNet
from hypjax.models.vit import VisionTransformer

Encoder = VisionTransformer | ResNet

_SIZES = {"tiny": (192, 3), "small": (384, 6), "base": (768, 12)}  # Width and heads.
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
ARCHITECTURES = (*_TRANSFORMERS, "resnet50")


def create_encoder(
    timm_name: str,
    *,
    image_size: int | None = None,
    pooling: str | None = None,
    dtype: DTypeLike = jnp.float32,
    remat: bool = False,
) -> Encoder:
    """Builds the encoder that timm knows by a name.

    Args:
        timm_name: One of `ARCHITECTURES`, without the tag of pretrained weights.
        image_size: Side of an image in pixels; None: what the name says.
        pooling: How tokens become an embedding; None: as timm does, by the class token, the mean of
            both tokens of a distilled model, or the average of a ResNet's places.
        dtype: Of the products.
        remat: Whether a gradient computes what lies within a block again.

    Raises:
        UserError: The name is unknown, or the image size or the pooling does not fit.
    """
    if timm_name not in ARCHITECTURES:
        near = difflib.get_close_matches(timm_name, ARCHITECTURES, n=3, cutoff=0)
        raise UserError(f"unknown architecture {timm_name!r}; near ones are {', '.join(near)}")
    if timm_name == "resnet50":
        size = image_size or 224
        return checked(ResNet(size, pooling=pooling or "avg", dtype=dtype, remat=remat))
    family, size, *distilled, patch_size, native_size = timm_name.split("_")
    width, num_heads = _SIZES[size]
    encoder = VisionTransformer(
        image_size=image_size or int(native_size),
        patch_size=int(patch_size.removeprefix("patch")),
        width=width,
        depth=12,
        num_heads=num_heads,
        distilled=bool(distilled),
        pooling=pooling or ("cls_dist_mean" if distilled else "cls"),
        dtype=dtype,
        remat=remat,
    )
    return checked(encoder)


def checked(encoder: Encoder) -> Encoder:
    """Returns an encoder whose image size and pooling fit it.

    Raises:
        UserError: They do not.
    """
    valid = poolings(encoder.num_prefix_tokens)
    if encoder.pooling not in valid:
        raise UserError(
            f"the encoder cannot pool by {encoder.pooling!r}; choose among {', '.join(valid)}"
        )
    patch_size = getattr(encoder, "patch_size", 1)
    if encoder.image_size % patch_size:
        raise UserError(
            f"images of {encoder.image_size} pixels cannot be cut into patches of {patch_size}; "
            f"choose a multiple of {patch_size} as data.image_size"
        )
    return encoder


def same_architecture(one: Encoder, other: Encoder) -> bool:
    """Whether two encoders differ at most in images' size, pooling, and how they are computed."""
    apart = {name: getattr(other, name) for name in ("image_size", "pooling", "dtype", "remat")}
    return one.clone(**apart) == other


def encoder_shapes(encoder: Encoder, channels: int = 3) -> PyTree:
    """Shapes and dtypes of an encoder's parameters, without computing any."""
    side = encoder.image_size
    images = jax.ShapeDtypeStruct((1, side, side, channels), jnp.float32)
    return jax.eval_shape(encoder.init, jax.random.key(0), images)["params"]
