"""The variants of the datasets' configurations: a loss, an encoder and perhaps a suffix."""

import functools
from collections.abc import Collection, Mapping
from typing import NamedTuple

from hypjax.errors import UserError, nearest, similar
from hypjax.objectives.pair_losses import PAIR_LOSSES
from hypjax.objectives.proxy_losses import PROXY_LOSSES
from hypjax.system import machine

HYP_VIT_SPACES = {"hyp": "poincare", "sph": "sphere"}  # Of Hyp-ViT's loss, by variant.
# HIER on top of Proxy-Anchor, as published, and of the loss of Hyp-ViT.
HIER = {"hier": "hier+proxy_anchor", "hyp+hier": "hier+pairwise_cross_entropy"}
# LHIER+ (Bdeir and Landwehr, 2024) as far as it is known, see docs/papers.md. **Experimental**.
HIER["lhier"] = HIER["hier"]
# λ of IRT's losses, the weight of the differential entropy.
KOLEO_WEIGHTS = {"irt-l": 0.0, "irt-r": 0.7}
# Losses to compare with, on the sphere. Their fields have the defaults.
_COMPARED = (PROXY_LOSSES | PAIR_LOSSES).items()
LOSSES = {loss.variant or name: name for name, loss in _COMPARED if not loss.by_tuple}
_PUBLISHED = (*HYP_VIT_SPACES, "mix", "moco", *HIER, *LOSSES)  # For encoders of the papers.
_ALL = (*_PUBLISHED, *KOLEO_WEIGHTS)
UNLABELLED = (*HYP_VIT_SPACES, "moco")  # Losses that Hyp-ViT's supplement trains without labels.
OBJECTIVE_OF_LOSS = {
    **dict.fromkeys(HYP_VIT_SPACES, "pairwise_cross_entropy"),
    **{"mix": "hypmix", "moco": "supcon", "happier": "happier", **HIER, **LOSSES},
    **dict.fromkeys(("irt-o", *KOLEO_WEIGHTS), "contrastive"),
}


class PretrainedEncoder(NamedTuple):
    """A pretrained encoder by timm's name of its weights, as the paper fine-tunes it."""

    weights: str
    learning_rate: float  # Constant.
    pooling: str = "cls"
    eval_pooling: str = ""  # If it is another one.
    layer_decay: float = 1.0  # See `optim.layer_decay`.
    losses: tuple[str, ...] = _PUBLISHED  # Losses with variants of this encoder.


# On learning rates the paper and the released code agree.
ENCODERS = {
    # Pretrained on ImageNet-21k, then ImageNet-1k.
    "vit": PretrainedEncoder("vit_small_patch16_224.augreg_in21k_ft_in1k", 3e-5),
    # The released code trains on the class token and evaluates the mean of the class and the
    # distillation token, since its version of timm returned these.
    "deit": PretrainedEncoder(
        "deit_small_distilled_patch16_224.fb_in1k", 3e-5, eval_pooling="cls_dist_mean"
    ),
    "dino": PretrainedEncoder("vit_small_patch16_224.dino", 1e-5),
    "dino-patch8": PretrainedEncoder(
        "vit_small_patch8_224.dino", 1e-5, losses=tuple(HYP_VIT_SPACES)
    ),
    "resnet50": PretrainedEncoder(  # HIER; BatchNorm keeps the statistics of the weights.
        "resnet50.tv_in1k", 1e-4, pooling="avg_max", losses=("hyp", "pa", *HIER)
    ),
}
# Encoders of today, **untried** on full datasets. Rates are our choice: DINO's for encoders trained
# without labels or by texts, with CLIP's layer decay (Dong et al., 2022: 0.6 to 0.75).
_TODAY = functools.partial(PretrainedEncoder, learning_rate=1e-5, layer_decay=0.75)
RECENT = {
    "dinov2": _TODAY("vit_small_patch14_dinov2.lvd142m"),
    "dinov3": _TODAY("vit_small_patch16_dinov3_qkvb.lvd1689m"),
    "siglip2": _TODAY("vit_base_patch16_siglip_224.v2_webli", pooling="map"),
    "clip": _TODAY("vit_base_patch16_clip_quickgelu_224.openai"),
    "lite": PretrainedEncoder("tf_efficientnet_lite0.in1k", 1e-4, pooling="avg"),
}
ENCODERS |= RECENT

# By encoder, parameters below its last blocks: two of 12, or the last two of seven stages.
LOWER = {
    "dinov2": ("cls_token", "pos_embed", "patch_embed", "block_[0-9]"),
    "lite": ("stem_*", "stage_[0-4]_*"),
}

# IRT's recipe, see `hypjax.config.irt`; Cars and folders have none.
_IRT_ENCODERS = {"": "deit", "-distilled": "deit-distilled", "-resnet50": "resnet50"}
IRT_VARIANTS = tuple(f"irt-{kind}{end}" for kind in "olr" for end in _IRT_ENCODERS)


class Variant(NamedTuple):
    """One of a dataset's experiments."""

    name: str  # Such as 'hyp-dino'.
    loss: str  # A key of `OBJECTIVE_OF_LOSS`.
    encoder: str  # A key of `ENCODERS`; for IRT's recipe, of `hypjax.config.irt`.
    # 'released': the steps of the released commands; 'hyp-vit': ResNet-50 by Hyp-ViT's recipe;
    # 'unlabelled': `recipes.train_without_labels`; 'frozen': `recipes.train_head`; 'last': also the
    # encoder's last blocks.
    suffix: str = ""


def parse_variant(
    name: str,
    *,
    short: Mapping[str, str] | None = None,
    further: Collection[str] = (),
    released: bool = False,
    with_irt: bool = False,
    losses: tuple[str, ...] = (),
) -> Variant:
    """Parses a variant, such as 'hyp-dino,released'; a `UserError` lists losses and encoders.

    `short` maps short names to variants; messages also list the caller's `further` ones. `released`
    allows that suffix, `with_irt` the `IRT_VARIANTS`, and `losses` are further ones.
    """
    name = (short or {}).get(name, name)
    if with_irt and name in IRT_VARIANTS:
        return Variant(name, name[:5], _IRT_ENCODERS[name[5:]])
    stem, comma, suffix = name.partition(",")
    loss = next((loss for loss in (*losses, *_ALL) if stem.startswith(f"{loss}-")), "")
    encoder = stem.removeprefix(f"{loss}-")
    recent = encoder in RECENT
    if encoder in ENCODERS and (loss if recent else loss in (*losses, *ENCODERS[encoder].losses)):
        suffixes = ["frozen"] + ["last"] * (encoder in LOWER)
        suffixes += ["hyp-vit"] * ((loss, encoder) == ("hyp", "resnet50"))
        suffixes += ["released"] * (released and loss in HYP_VIT_SPACES and not recent)
        suffixes += ["unlabelled"] * (loss in UNLABELLED and not recent)
        if suffix in suffixes or not comma:
            return Variant(name, loss, encoder, suffix)
        rule = f"{stem} with {' or '.join(f',{end}' for end in suffixes)} at its end, or none"
    else:
        rule = "a loss and an encoder that go together, such as hyp-dino; losses are "
        rule += f"{', '.join((*losses, *_ALL))}, encoders {', '.join(ENCODERS)}"
        others = [*(short or {}), *further, *(IRT_VARIANTS if with_irt else ())]
        rule += f"; or one of {', '.join(others)}" if others else ""
        pairs = [f"{kind}-{name}" for name, x in ENCODERS.items() for kind in x.losses]
        ends = [f"{pair},frozen" for pair in pairs] if comma else []
        rule += similar(name, [*pairs, *ends, *others])
    raise UserError(f"unknown variant {name!r}; it must be {rule}")


def variant_for_this_machine() -> str:
    """Default variant of datasets that no paper has a recipe for."""
    return "hyp-dinov2" if machine.has_accelerator() else "hyp-lite,frozen"


def variant_error(variant: str, valid: Collection[str]) -> UserError:
    """Returns the error that a configuration file raises for an unknown variant."""
    return UserError(f"unknown variant {variant!r}{nearest(variant, valid)}")
