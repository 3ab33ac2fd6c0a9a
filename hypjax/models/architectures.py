"""Encoders by their names in timm, with timm's sizes, pixel scaling and licences."""

import dataclasses
import difflib
import fnmatch
import itertools
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import PyTree

from hypjax.errors import UserError
from hypjax.models.blocks import BlockDesign, Rotary
from hypjax.models.convnext import ConvNeXt
from hypjax.models.efficientnet import EfficientNetLite
from hypjax.models.encoder import Encoder
from hypjax.models.resnet import ResNet
from hypjax.models.vit import VisionTransformer
from hypjax.settings import EncoderSettings
from hypjax.types import View


class Weights(NamedTuple):
    """Pixel scaling and licence of the published weights whose names match a pattern."""

    pattern: str  # Such as '*.augreg*'.
    mean: tuple[float, float, float]  # Mean of each channel of pixels from 0 to 1.
    std: tuple[float, float, float]  # Standard deviation of each channel.
    licence: str


class Family(NamedTuple):
    """Encoders that differ only in size."""

    title: str  # Name and papers.
    # Attributes by timm's name, except the sides that the name contains, as in 'patch16_224'.
    members: Mapping[str, Mapping[str, Any]]
    weights: tuple[Weights, ...]  # The first matching pattern counts.
    encoder: type[Encoder] = VisionTransformer
    options: Mapping[str, Any] = {}  # Attributes that all members share, but may override.
    pooling: str = "cls"  # timm's default.


# Mean and standard deviation of pixels.
_IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
HALF_PIXELS = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)
CLIP_PIXELS = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
_APACHE, _MIT, _BSD = "apache-2.0", "mit", "bsd-3-clause"  # As on the hub.
_NONCOMMERCIAL, _DINO3 = "cc-by-nc-4.0", "dinov3-license"

_SIZES = {  # Width, blocks, heads.
    "tiny": (192, 12, 3),
    "small": (384, 12, 6),
    "base": (768, 12, 12),
    "large": (1024, 24, 16),
    "so400m": (1152, 27, 16),
    "huge": (1280, 32, 20),
    "giant": (1536, 40, 24),
    "gigantic": (1664, 48, 16),
}


def _sized(*patterns: str, **options: Any) -> dict[str, dict[str, Any]]:
    """Members of each pattern, such as 'vit_{tiny,small}_patch16_224'; names contain the size."""
    members = {}
    for pattern in patterns:
        alternatives = [choices.split(",") for choices in re.split("[{}]", pattern)]
        for name in map("".join, itertools.product(*alternatives)):
            width, depth, num_heads = _SIZES[next(size for size in _SIZES if size in name)]
            members[name] = {"width": width, "depth": depth, "num_heads": num_heads} | options
    return members


_DINO_BLOCKS = BlockDesign(layer_scale=True)
_REGISTERS = {"registers": 4, "positions": "patches"}
_GIANT_BLOCKS = dataclasses.replace(_DINO_BLOCKS, activation="silu", gate="packed")
_GIANT = {"mlp_ratio": 4096 / 1536, "blocks": _GIANT_BLOCKS}
_DINO3_ROTARY = Rotary(temperature=100, centred=True, halves=True)
_DINO3_BLOCKS = BlockDesign(norm_eps=1e-5, qkv_bias="", layer_scale=True, rotary=_DINO3_ROTARY)
_GATED_DINO3_BLOCKS = dataclasses.replace(_DINO3_BLOCKS, activation="silu", gate="separate")
_CLIP_BLOCKS = BlockDesign(norm_eps=1e-5)
_QUICK_BLOCKS = dataclasses.replace(_CLIP_BLOCKS, activation="quick_gelu")
_CLIP = {"pre_norm": True, "blocks": _CLIP_BLOCKS}
_SIGLIP = {"class_tokens": 0}
_SO400M = {"mlp_ratio": 4304 / 1152, "attention_pool": 16}
_TANH_BLOCKS = BlockDesign(activation="gelu_tanh")
_GIANTOPT = {"num_heads": 16, "attention_pool": 16, "blocks": _TANH_BLOCKS}
_EVA_BLOCKS = BlockDesign(
    activation="silu", gate="packed", qkv_bias="qv", rotary=Rotary(reference=16)
)
_LARGE_EVA_BLOCKS = dataclasses.replace(
    _EVA_BLOCKS, gate="separate", mlp_norm=True, qkv_packed=False
)


def _dino3(sizes: str, blocks: BlockDesign) -> dict[str, dict[str, Any]]:
    """DINOv3's members of some sizes; if "qkvb" is in the name, queries and values have biases."""
    biased = dataclasses.replace(blocks, qkv_bias="qv")
    pattern = f"vit_{{{sizes}}}_patch16_dinov3"
    return _sized(pattern, blocks=blocks) | _sized(f"{pattern}_qkvb", blocks=biased)


def _perception(side: int) -> dict[str, Any]:
    """Blocks of a Perception Encoder that was pretrained with grids of side × side patches."""
    rotary = Rotary(reference=side, offset=1, columns_first=True)
    return {"blocks": BlockDesign(norm_eps=1e-5, rotary=rotary)}


FAMILIES = (
    Family(
        "ViT (Dosovitskiy et al., ICLR 2021; Steiner et al., 2022), DINO (Caron et al., ICCV 2021)"
        ", DeiT (Touvron et al., ICML 2021)",
        _sized(
            "vit_tiny_patch16_{224,384}",
            "vit_{small,base}_patch{32_224,32_384,16_224,16_384,8_224}",
            "vit_large_patch{32,16}_{224,384}",
            "deit_{tiny,small,base}_patch16_224",
            "deit_base_patch16_384",
        ),
        (
            Weights("*.dino", *_IMAGENET, _APACHE),
            Weights("deit*", *_IMAGENET, _APACHE),
            Weights("*.mae", *_IMAGENET, _NONCOMMERCIAL),
            Weights("*.augreg*", *HALF_PIXELS, _APACHE),
            Weights("*.orig*", *HALF_PIXELS, _APACHE),
            Weights("*.sam*", *HALF_PIXELS, _APACHE),
            Weights("*.bamboo", *CLIP_PIXELS, "none listed"),
        ),
    ),
    Family(
        "DeiT, distilled",
        _sized("deit_{tiny,small,base}_distilled_patch16_224", "deit_base_distilled_patch16_384"),
        (Weights("*.fb_in1k", *_IMAGENET, _APACHE),),
        options={"class_tokens": 2},
        pooling="cls_dist_mean",
    ),
    Family(
        "DeiT III (Touvron et al., ECCV 2022)",
        _sized("deit3_{small,base,large}_patch16_{224,384}"),
        (Weights("*.fb_*", *_IMAGENET, _APACHE),),
        options={"positions": "patches", "blocks": _DINO_BLOCKS},
    ),
    Family(
        "DINOv2 (Oquab et al., TMLR 2024), with registers (Darcet et al., ICLR 2024)",
        _sized("vit_{small,base,large}_patch14_dinov2")
        | _sized("vit_giant_patch14_dinov2", **_GIANT)
        | _sized("vit_{small,base,large}_patch14_reg4_dinov2", **_REGISTERS)
        | _sized("vit_giant_patch14_reg4_dinov2", **_REGISTERS, **_GIANT),
        (Weights("*.lvd142m", *_IMAGENET, _APACHE),),
        options={"image_size": 518, "blocks": _DINO_BLOCKS},
    ),
    Family(
        "DINOv3 (Siméoni et al., 2025)",
        _dino3("small,base,large", _DINO3_BLOCKS)
        | _dino3("small_plus,huge_plus", _GATED_DINO3_BLOCKS),
        (
            Weights("*.lvd1689m", *_IMAGENET, _DINO3),
            Weights("*.sat493m", (0.430, 0.411, 0.296), (0.213, 0.156, 0.143), _DINO3),
            Weights("*.eupe*", *_IMAGENET, "fair-noncommercial-research-license"),
        ),
        options={"image_size": 256, "registers": 4, "positions": "none", "blocks": _DINO3_BLOCKS},
        pooling="avg",
    ),
    Family(
        "SigLIP (Zhai et al., ICCV 2023), SigLIP 2 (Tschannen et al., 2025)",
        _sized(
            "vit_base_patch32_siglip_256",
            "vit_base_patch16_siglip_{224,256,384,512}",
            attention_pool=12,
        )
        | _sized("vit_large_patch16_siglip_{256,384,512}", attention_pool=16)
        | _sized("vit_so400m_patch14_siglip_{224,378}", **_SO400M)
        | _sized("vit_so400m_patch16_siglip_{256,384,512}", **_SO400M, blocks=_TANH_BLOCKS)
        | _sized("vit_giantopt_patch16_siglip_{256,384}", **_GIANTOPT),
        (Weights("*webli*", *HALF_PIXELS, _APACHE),),
        options=_SIGLIP,
        pooling="map",
    ),
    Family(
        "CLIP (Radford et al., ICML 2021; Cherti et al., CVPR 2023; Fang et al., ICLR 2024)",
        _sized(
            "vit_base_patch32_clip_{224,256}",
            "vit_base_patch16_clip_{224,384}",
            "vit_large_patch14_clip_{224,336}",
        )
        | _sized("vit_base_patch{32,16}_clip_quickgelu_224", blocks=_QUICK_BLOCKS)
        | _sized("vit_large_patch14_clip_quickgelu_{224,336}", blocks=_QUICK_BLOCKS)
        | _sized("vit_huge_patch14_clip_{224,336,378}", num_heads=16)
        | _sized("vit_huge_patch14_clip_quickgelu_{224,378}", num_heads=16, blocks=_QUICK_BLOCKS)
        | _sized("vit_giant_patch14_clip_224", width=1408, num_heads=16, mlp_ratio=48 / 11)
        | _sized("vit_gigantic_patch14_clip_{224,378}", mlp_ratio=64 / 13),
        (
            Weights("*.dfn*", *CLIP_PIXELS, "apple-ascl"),
            Weights("*.apple_mclip*", *CLIP_PIXELS, "apple-amlr"),
            Weights("*.laion400m*", *CLIP_PIXELS, _MIT),
            Weights("*.metaclip*", *CLIP_PIXELS, _NONCOMMERCIAL),
            Weights("vit_large_*.laion2b*", *HALF_PIXELS, _APACHE),
            Weights("*", *CLIP_PIXELS, _APACHE),
        ),
        options=_CLIP,
    ),
    Family(
        "Perception Encoder (Bolya et al., 2025)",
        _sized("vit_pe_core_small_patch16_384", **_perception(24))
        | _sized("vit_pe_core_base_patch16_224", **_perception(14))
        | _sized("vit_pe_core_large_patch14_336", **_perception(24)),
        (Weights("*.fb", *HALF_PIXELS, _APACHE),),
        options={"pre_norm": True, "attention_pool": 8},
        pooling="map",
    ),
    Family(
        "EVA-02 (Fang et al., 2023)",
        _sized("eva02_small_patch14_{224,336}", blocks=_EVA_BLOCKS)
        | _sized("eva02_{base,large}_patch14_{224,448}"),
        (Weights("*.mim*", *CLIP_PIXELS, _MIT),),
        options={"mlp_ratio": 8 / 3, "pool_first": True, "blocks": _LARGE_EVA_BLOCKS},
        pooling="avg",
    ),
    Family(
        "ResNet (He et al., CVPR 2016)",
        {"resnet50": {"depths": (3, 4, 6, 3)}, "resnet101": {"depths": (3, 4, 23, 3)}},
        (
            Weights("*.tv*", *_IMAGENET, _BSD),
            Weights("*.fb_*", *_IMAGENET, _NONCOMMERCIAL),
            Weights("*", *_IMAGENET, _APACHE),
        ),
        encoder=ResNet,
        options={"image_size": 224},
        pooling="avg",
    ),
    Family(
        "ConvNeXt (Liu et al., CVPR 2022), DINOv3 (Siméoni et al., 2025)",
        {
            "convnext_tiny": {"depths": (3, 3, 9, 3)},
            "convnext_small": {},
            "convnext_base": {"widths": (128, 256, 512, 1024)},
        },
        (
            Weights("*.dinov3*", *_IMAGENET, _DINO3),
            Weights("*.eupe*", *_IMAGENET, "fair-noncommercial-research-license"),
            Weights("*.clip*", *CLIP_PIXELS, _APACHE),
            Weights("*", *_IMAGENET, _APACHE),
        ),
        encoder=ConvNeXt,
        options={"image_size": 224},
        pooling="avg",
    ),
    Family(
        "EfficientNet-Lite (Tan and Le, ICML 2019; Google, 2020)",
        {
            "tf_efficientnet_lite0": {"image_size": 224},
            "tf_efficientnet_lite1": {"image_size": 240, "depth_factor": 1.1},
            "tf_efficientnet_lite2": {"image_size": 260, "width_factor": 1.1, "depth_factor": 1.2},
            "tf_efficientnet_lite3": {"image_size": 300, "width_factor": 1.2, "depth_factor": 1.4},
            "tf_efficientnet_lite4": {"image_size": 380, "width_factor": 1.4, "depth_factor": 1.8},
        },
        (Weights("*.in1k", *HALF_PIXELS, _APACHE),),
        encoder=EfficientNetLite,
        pooling="avg",
    ),
)
_FAMILY_OF = {name: family for family in FAMILIES for name in family.members}
ARCHITECTURES = tuple(_FAMILY_OF)
# Transformers whose sizes are the configuration's, with the options of their design.
UNSIZED: dict[str, dict[str, Any]] = {"vit": {}, "vit_clip": _CLIP, "vit_siglip": _SIGLIP}
_MAX_LISTED = 5  # Names in a message.
_SIMILARITY = 0.6  # Least ratio of `difflib` of a name in a message that shares no word.


def create_encoder(
    timm_name: str,
    *,
    image_size: int | tuple[int, int] | None = None,
    pooling: str | None = None,
    pool_first: bool | None = None,
    dtype: DTypeLike = jnp.float32,
    remat: bool = False,
) -> Encoder:
    """Builds an encoder by its name in timm: [batch, h, w, channels] to [batch, dim].

    Args:
        timm_name: One of `ARCHITECTURES`, without the tag of pretrained weights.
        image_size: Side of the images in pixels, or height and width; None for timm's default.
        pooling: One of the encoder's `poolings`; None for timm's default.
        pool_first: Whether the final LayerNorm of a Transformer follows the pooling, as in timm's
            models with `fc_norm`; None for timm's default.
        dtype: Dtype of matrix products and convolutions.
        remat: Whether to recompute the activations of blocks in the backward pass.
    """
    if timm_name not in ARCHITECTURES:
        raise UserError(f"unknown architecture {timm_name!r}; it must be {supported(timm_name)}")
    family = _FAMILY_OF[timm_name]
    options = {"pooling": family.pooling, "dtype": dtype, "remat": remat, **family.options}
    for name, pattern in (("patch_size", r"patch(\d+)"), ("image_size", r"_(\d{3})$")):
        if side := re.search(pattern, timm_name):
            options[name] = int(side[1])
    options |= family.members[timm_name]
    if pool_first is not None and family.encoder is not VisionTransformer:
        raise UserError(f"pool_first is {pool_first}; it must be None, as for all ConvNets")
    chosen = {"image_size": image_size, "pooling": pooling, "pool_first": pool_first}
    options |= {name: value for name, value in chosen.items() if value is not None}
    return check_encoder(family.encoder(**options))


def create_unsized(settings: EncoderSettings) -> VisionTransformer:
    """Builds a Transformer of the settings' sizes; SigLIP's pools by as many heads as blocks."""
    sizes = settings.patch_size, settings.width, settings.depth, settings.num_heads
    encoder = VisionTransformer(settings.view.side, *sizes, **UNSIZED[settings.architecture])
    heads, ratio = 0 if encoder.class_tokens else settings.num_heads, settings.mlp_ratio
    return encoder.clone(
        attention_pool=heads, mlp_ratio=ratio, pool_first=settings.pool_first or False
    )


def is_transformer(architecture: str) -> bool:
    """Whether an architecture, named as in timm or unsized, is a Vision Transformer."""
    family = _FAMILY_OF.get(architecture)  # None for a user's encoder.
    return architecture in UNSIZED or (family is not None and family.encoder is VisionTransformer)


def published_weights(name: str) -> Weights | None:
    """Published weights by timm's name, such as 'vit_small_patch16_224.dino'; None if unknown."""
    family = _FAMILY_OF.get(name.partition(".")[0])
    weights = family.weights if family else ()
    return next((entry for entry in weights if fnmatch.fnmatchcase(name, entry.pattern)), None)


def supported(name: str) -> str:
    """Lists, for a message, the supported architectures with the most similar names."""

    def similarity(other: str) -> tuple[int, float]:
        shared = set.intersection(*({*re.findall(r"[a-z]+|\d+", x)} for x in (name.lower(), other)))
        return len(shared), difflib.SequenceMatcher(None, name.lower(), other).ratio()

    ranked = sorted(ARCHITECTURES, key=similarity, reverse=True)[:_MAX_LISTED]
    nearest = [x for x in ranked if max(similarity(x)) >= _SIMILARITY]
    return f"{', '.join(nearest or ['one'])} {'or another ' if nearest else ''}of docs/encoders.md"


def check_encoder(encoder: Encoder) -> Encoder:
    """Checks an encoder's image size and pooling, and returns the encoder."""
    if encoder.pooling not in encoder.poolings:
        names = ", ".join(encoder.poolings)
        raise UserError(f"model.pooling or eval_pooling is {encoder.pooling!r}; it must be {names}")
    patch = getattr(encoder, "patch_size", 1)
    smallest = getattr(encoder, "min_side", patch)
    if any(side % patch or side < smallest for side in encoder.sides):
        rule = f"at least {smallest}, and a multiple of {patch}"
        raise UserError(f"data.image_size is {encoder.image_size}; it must be {rule}")
    return encoder


def same_architecture(encoder: Encoder, other: Encoder) -> bool:
    """Whether two encoders have the same parameters, except for sizes that depend on the images."""
    if type(encoder) is not type(other):
        return False
    ignored = {"image_size", "pooling", "dtype", "remat", "tensor_cores", "attention"}
    ignored |= {"residual", "gem_exponent", "learn_gem", "pool_first"}
    ignored &= other.__dataclass_fields__.keys()  # Some encoders lack some of these fields.
    return encoder.clone(**{name: getattr(other, name) for name in ignored}) == other


def timm_name(encoder: Encoder) -> str | None:
    """The name of an encoder's architecture in timm; None for an architecture without a name."""
    names = (name for name in ARCHITECTURES if same_architecture(create_encoder(name), encoder))
    return next(names, None)


def is_in_timm(encoder: Encoder) -> bool:
    """Whether timm builds an encoder by name or, for a plain Transformer, by its sizes."""
    if timm_name(encoder):
        return True
    if not isinstance(encoder, VisionTransformer):
        return False
    sizes = encoder.patch_size, encoder.width, encoder.depth, encoder.num_heads
    return same_architecture(VisionTransformer(encoder.image_size, *sizes), encoder)


def pool_first_field(encoder: Encoder) -> bool | None:
    """Value of `model.pool_first` for an encoder: None if it is its architecture's."""
    name = timm_name(encoder)
    default = create_encoder(name) if name else VisionTransformer
    return None if encoder.pool_first == default.pool_first else encoder.pool_first


def encoder_shapes(encoder: Encoder, channels: int = 3) -> PyTree:
    """Shapes of an encoder's parameters, a tree of `jax.ShapeDtypeStruct`; computes nothing."""
    if encoder.takes_pixels:
        inputs = jax.ShapeDtypeStruct((1, *encoder.sides, channels), jnp.float32)
    else:
        inputs = jax.eval_shape(lambda: encoder.example(View(0, 0, channels)))
    return jax.eval_shape(encoder.init, jax.random.key(0), inputs).get("params", {})
