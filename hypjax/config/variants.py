"""The variants of the datasets' configurations: their encoders, losses and suffixes, by name."""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from hypjax.errors import UserError, nearest
from hypjax.system import machine

SPACES = {"hyp": "poincare", "sph": "sphere"}

_RELEASED = ",released"
FROZEN = ",frozen"
_LAST = ",last"


@dataclasses.dataclass(frozen=True)
class PretrainedEncoder:
    """A pretrained encoder by timm's name of its weights, as the paper fine-tunes it."""

    weights: str
    learning_rate: float  # Constant.
    eval_pooling: str = "cls"
    pooling: str = "cls"
    layer_decay: float = 1.0  # See `optim.layer_decay`.

    @property
    def architecture(self) -> str:
        """Name of the architecture in timm."""
        return self.weights.partition(".")[0]


# On learning rates the paper and the released code agree.
ENCODERS = {
    "vit": PretrainedEncoder(  # Pretrained on ImageNet-21k, then ImageNet-1k.
        "vit_small_patch16_224.augreg_in21k_ft_in1k", learning_rate=3e-5
    ),
    "deit": PretrainedEncoder(
        "deit_small_distilled_patch16_224.fb_in1k",
        learning_rate=3e-5,
        # The released code trains on the class token and evaluates the mean of the class and the
        # distillation token, since its version of timm returned these.
        eval_pooling="cls_dist_mean",
    ),
    "dino": PretrainedEncoder("vit_small_patch16_224.dino", learning_rate=1e-5),
    "dino-patch8": PretrainedEncoder("vit_small_patch8_224.dino", learning_rate=1e-5),
    "resnet50": PretrainedEncoder(  # HIER; BatchNorm keeps the statistics of the weights.
        "resnet50.tv_in1k",
        learning_rate=1e-4,
        pooling="avg_max",
        eval_pooling="avg_max",
    ),
}
VARIANTS = tuple(f"{space}-{encoder}" for space in SPACES for encoder in ("vit", "deit", "dino"))
# Encoders of today. **Untried**: nobody has trained these variants on a whole dataset yet. The
# rates are our choice: those of DINO for encoders trained without labels or by texts, with the
# layer decay by which CLIP is fine-tuned (Dong et al., 2022: 0.6 to 0.75).
RECENT = {
    "dinov2": PretrainedEncoder(
        "vit_small_patch14_dinov2.lvd142m", learning_rate=1e-5, layer_decay=0.75
    ),
    "dinov3": PretrainedEncoder(
        "vit_small_patch16_dinov3_qkvb.lvd1689m", learning_rate=1e-5, layer_decay=0.75
    ),
    "siglip2": PretrainedEncoder(
        "vit_base_patch16_siglip_224.v2_webli",
        learning_rate=1e-5,
        layer_decay=0.75,
        pooling="map",
        eval_pooling="map",
    ),
    "clip": PretrainedEncoder(
        "vit_base_patch16_clip_quickgelu_224.openai", learning_rate=1e-5, layer_decay=0.75
    ),
    "lite": PretrainedEncoder(
        "tf_efficientnet_lite0.in1k", learning_rate=1e-4, pooling="avg", eval_pooling="avg"
    ),
}
ENCODERS |= RECENT

# By encoder, parameters below its last blocks: two of 12, or the last two of seven stages.
LOWER = {
    "dinov2": ("cls_token", "pos_embed", "patch_embed", "block_[0-9]"),
    "lite": ("stem_*", "stage_[0-4]_*"),
}

# Losses to compare with, by the names of their variants. Fields of the losses have their
# defaults, see `hypjax.objectives`.
LOSSES = {
    "pa": "proxy_anchor",
    "nca": "proxy_nca",
    "softmax": "normalized_softmax",
    "softtriple": "soft_triple",
    "ms": "multi_similarity",
    "contrastive": "contrastive",
    "triplet": "triplet",
    "supcon": "supcon",
    "snca": "scalable_nca",
    "arcface": "arcface",
    "cosface": "cosface",
    "circle": "circle",
}
LOSS_VARIANTS = tuple(
    f"{loss}-{encoder}" for loss in ("mix", *LOSSES) for encoder in ("vit", "deit", "dino")
)
# λ of IRT's variants, the weight of the differential entropy.
KOLEO_WEIGHTS = {"irt-l": 0.0, "irt-r": 0.7}
# HIER on top of Proxy-Anchor, as published, and of the loss of Hyp-ViT.
HIER = {"hier": "hier+proxy_anchor", "hyp+hier": "hier+pairwise_cross_entropy"}
# Trained by the recipe of HIER, see `hypjax.config.hier`.
HIER_VARIANTS = (
    *(f"{loss}-{encoder}" for loss in HIER for encoder in ("vit", "deit", "dino", "resnet50")),
    *("hyp-resnet50", "pa-resnet50"),
)
RECENT_VARIANTS = tuple(
    f"{loss}-{encoder}"
    for loss in (*SPACES, "mix", *HIER, *LOSSES, *KOLEO_WEIGHTS)
    for encoder in RECENT
)
LAST_VARIANTS = tuple(name + _LAST for name in RECENT_VARIANTS if name.rpartition("-")[2] in LOWER)
# These follow the recipe of IRT, see `hypjax.config.irt`. Cars and folders have none of them.
IRT_VARIANTS = tuple(f"irt-{kind}{d}" for kind in "olr" for d in ("", "-distilled"))


class Variant(NamedTuple):
    """One of a dataset's experiments."""

    name: str  # Such as 'hyp-dino'.
    # A key of `SPACES`, 'mix' for HypMix, which uses both, a key of `HIER`, 'irt-o', 'irt-l' or
    # 'irt-r', or a key of `LOSSES` for another loss on the sphere.
    space: str
    encoder: str  # A key of `ENCODERS`; for IRT's recipe, of those of `hypjax.config.irt`.
    released: bool = False  # Whether it takes as many steps as the released commands.
    frozen: bool = False  # Whether only a head is trained, see `recipes.train_head`.
    last: bool = False  # Whether the encoder's last blocks are trained, too.


def parse_variant(
    name: str,
    extra: Sequence[str] = (),
    *,
    short: Mapping[str, str] | None = None,
    with_irt: bool = False,
) -> Variant:
    """Parses a variant, such as 'hyp-dino,released'; a suggestion follows an unknown one.

    `extra` are further variants of a dataset, `short` are short names with their variants.
    """
    short = short or {}
    name = short.get(name, name)
    valid = [one + suffix for suffix in ("", _RELEASED) for one in (*VARIANTS, *extra)]
    # Of these there are no released commands.
    others = (*LOSS_VARIANTS, *HIER_VARIANTS, *RECENT_VARIANTS)
    valid += (*others, *(one + FROZEN for one in (*VARIANTS, *extra, *others)))
    valid += LAST_VARIANTS
    valid += IRT_VARIANTS if with_irt else ()
    if name not in valid:
        raise variant_error(name, [*short, *valid])
    if name in IRT_VARIANTS:
        return Variant(name, name[:5], f"deit{name[5:]}")
    named, _, suffix = name.partition(",")
    space = next((loss for loss in KOLEO_WEIGHTS if named.startswith(loss)), named.split("-")[0])
    encoder = named.removeprefix(f"{space}-")
    chosen = (f",{suffix}" == each for each in (_RELEASED, FROZEN, _LAST))
    return Variant(name, space, encoder, *chosen)


def variant_for_this_machine() -> str:
    """The variant that is chosen where none is named, unless a paper's recipe is the default."""
    return "hyp-dinov2" if machine.has_accelerator() else f"hyp-lite{FROZEN}"


def variant_error(variant: str, valid: Collection[str]) -> UserError:
    """Returns the error that a configuration file raises for an unknown variant."""
    losses = LOSSES | HIER | {"mix": "hypmix"}
    loss = variant.partition("-")[0]
    if loss not in losses or any(name.partition("-")[0] == loss for name in valid):
        return UserError(f"unknown variant {variant!r}{nearest(variant, valid)}")
    return UserError(
        f"unknown variant {variant!r}; choose one of {', '.join(valid)}, and set this loss by "
        f"--config.objective.name={losses[loss]}"
    )
