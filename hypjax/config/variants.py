"""Variants of the datasets' configurations: a loss, an encoder and perhaps a suffix."""

from collections.abc import Collection, Mapping
from typing import NamedTuple

from hypjax.errors import UserError, nearest, similar
from hypjax.objectives.pair_losses import PAIR_LOSSES
from hypjax.objectives.proxy_losses import PROXY_LOSSES
from hypjax.system import machine

HYP_VIT_SPACES = {"hyp": "poincare", "sph": "sphere"}  # Spaces of Hyp-ViT's loss, by variant.
# HIER on top of Proxy-Anchor, as published, and on top of Hyp-ViT's loss.
HIER = {"hier": "hier+proxy_anchor", "hyp+hier": "hier+pairwise_cross_entropy"}
# LHIER+ (Bdeir and Landwehr, 2024), as much as is known of it, see docs/papers.md. Experimental.
HIER["lhier"] = HIER["hier"]
# λ of IRT's losses, the weight of the differential entropy.
KOLEO_WEIGHTS = {"irt-l": 0.0, "irt-r": 0.7}
# Baseline losses on the sphere, with the defaults of their fields.
_BASELINES = (PROXY_LOSSES | PAIR_LOSSES).items()
LOSSES = {loss.variant or name: name for name, loss in _BASELINES if not loss.by_tuple}
_PUBLISHED = (*HYP_VIT_SPACES, "mix", "moco", *HIER, *LOSSES)  # Losses for the papers' encoders.
UNLABELLED = (*HYP_VIT_SPACES, "moco")  # Losses that Hyp-ViT's supplement trains without labels.
OBJECTIVE_OF_LOSS = {
    **dict.fromkeys(HYP_VIT_SPACES, "pairwise_cross_entropy"),
    **{"mix": "hypmix", "moco": "supcon", "happier": "happier", **HIER, **LOSSES},
    **dict.fromkeys(("irt-o", *KOLEO_WEIGHTS), "contrastive"),
}


# Losses that each encoder can be combined with. `hypjax.config.recipes.ENCODERS` has the weights,
# learning rates and pooling.
ENCODERS = {
    "vit": _PUBLISHED,
    "deit": _PUBLISHED,
    "dino": _PUBLISHED,
    "dino-patch8": tuple(HYP_VIT_SPACES),
    "resnet50": (*HYP_VIT_SPACES, "pa", *HIER),
}
# Recent encoders, untried on full datasets.
RECENT = ("dinov2", "dinov2-large", "dinov2-giant", "dinov3", "siglip2", "clip", "lite")
ENCODERS |= dict.fromkeys(RECENT, _PUBLISHED)

# Short names of heads on the features of an encoder.
FROZEN = {name: f"hyp-{name},frozen" for name in ("lite", "dinov2")}

# Parameters below an encoder's last two blocks, or last two of seven stages.
_TOKENS = "cls_token", "pos_embed", "patch_embed"
LOWER_LAYERS = {
    "dinov2": (*_TOKENS, "block_[0-9]"),
    "dinov2-large": (*_TOKENS, "block_[0-9]", "block_1[0-9]", "block_2[01]"),
    "dinov2-giant": (*_TOKENS, "block_[0-9]", "block_[12][0-9]", "block_3[0-7]"),
    "lite": ("stem_*", "stage_[0-4]_*"),
}

# Variants that follow IRT's recipe (`hypjax.config.irt`); Cars and folders have none.
_IRT_ENCODERS = {"": "deit", "-distilled": "deit-distilled", "-resnet50": "resnet50"}
IRT_VARIANTS = tuple(f"irt-{kind}{end}" for kind in "olr" for end in _IRT_ENCODERS)


class Variant(NamedTuple):
    """One of a dataset's experiments."""

    name: str  # Such as 'hyp-dino'.
    loss: str  # A key of `OBJECTIVE_OF_LOSS`.
    encoder: str  # A key of `ENCODERS`, or for IRT's recipe of `hypjax.config.irt.ENCODERS`.
    # 'released': as many steps as the released commands; 'hyp-vit': ResNet-50 by Hyp-ViT's recipe;
    # 'unlabelled': no labels; 'frozen': only the head is trained; 'last': also the last blocks.
    suffix: str = ""


def parse_variant(
    name: str,
    *,
    short: Mapping[str, str] | None = None,
    further: Collection[str] = (),
    released: Collection[str] = (),
    with_irt: bool = False,
    losses: tuple[str, ...] = (),
) -> Variant:
    """Parses a variant, such as 'hyp-dino,released'; raises a `UserError` for an unknown one.

    `short` holds variants by short names, and `further` the variants that the caller parses itself,
    for the error's message. `released` are the losses with the suffix 'released', and
    `with_irt` allows `IRT_VARIANTS`. `losses` are those that only this dataset has.
    """
    name = (short or {}).get(name, name)
    if with_irt and name in IRT_VARIANTS:
        loss = name[: len("irt-o")]
        return Variant(name, loss, _IRT_ENCODERS[name.removeprefix(loss)])
    stem, comma, suffix = name.partition(",")
    all_losses = (*losses, *_PUBLISHED, *KOLEO_WEIGHTS)
    loss = next((loss for loss in all_losses if stem.startswith(f"{loss}-")), "")
    encoder = stem.removeprefix(f"{loss}-")
    is_published = encoder in ENCODERS and loss in (*losses, *ENCODERS[encoder])
    if is_published or (encoder in RECENT and loss):
        is_recent = encoder in RECENT
        is_valid = {
            "frozen": True,
            "last": encoder in LOWER_LAYERS,
            "hyp-vit": loss in HYP_VIT_SPACES and encoder == "resnet50",
            "released": loss in released and not is_recent,
            "unlabelled": loss in UNLABELLED and not is_recent,
        }
        suffixes = [name for name in is_valid if is_valid[name]]
        if suffix in suffixes or not comma:
            return Variant(name, loss, encoder, suffix)
        rule = f"{stem} with {' or '.join(f',{end}' for end in suffixes)} at its end, or none"
    else:
        others = [*(short or {}), *further, *(IRT_VARIANTS if with_irt else ())]
        pairs = [f"{loss}-{name}" for name, own in ENCODERS.items() for loss in own]
        hint = "" if loss and encoder in ENCODERS else similar(stem, [*pairs, *others])
        if hint:
            raise UserError(f"unknown variant {name!r}{hint}")
        rule = "a loss and an encoder that go together, such as hyp-dino; losses are "
        rule += f"{', '.join(all_losses)}, encoders {', '.join(ENCODERS)}"
        rule += f"; or one of {', '.join(others)}" if others else ""
    raise UserError(f"unknown variant {name!r}; it must be {rule}")


def variant_for_this_machine() -> str:
    """Returns the default variant of the user's own images and of groceries."""
    return "hyp-dinov2" if machine.has_accelerator() else "hyp-lite,frozen"


def variant_error(variant: str, valid: Collection[str]) -> UserError:
    """Returns the error for an unknown variant, which a configuration file raises."""
    return UserError(f"unknown variant {variant!r}{nearest(variant, valid)}")
