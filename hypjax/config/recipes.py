"""The recipes of Hyp-ViT and Sph-ViT (Ermolov et al., CVPR 2022), shared by all datasets.

HypMix (Yue et al., WACV 2024) and other losses are trained by the same recipe, so that results
differ by the loss alone.

A file in `configs/` parses its variant, starts from `hyp_vit`, and sets what its dataset needs.
Numbers are the paper's; comments say where the authors' released code differs.
"""

import dataclasses
from collections.abc import Collection, Sequence
from typing import NamedTuple

from ml_collections import ConfigDict

from hypjax.config.defaults import choose_objective, default_config
from hypjax.errors import UserError, nearest
from hypjax.models import create_encoder
from hypjax.models.architectures import is_transformer, published_weights
from hypjax.system import machine

SPACES = {"hyp": "poincare", "sph": "sphere"}

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
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
# Trained by the recipe of IRT, see `hypjax.config.irt`; not for every dataset.
IRT_VARIANTS = tuple(f"irt-{kind}{d}" for kind in "olr" for d in ("", "-distilled"))


class Variant(NamedTuple):
    """One of a dataset's experiments."""

    name: str  # Such as 'hyp-dino'.
    # A key of `SPACES`, 'mix' for HypMix, which uses both, a key of `HIER`, 'irt-o', 'irt-l' or
    # 'irt-r', or a key of `LOSSES` for another loss on the sphere.
    space: str
    encoder: str  # A key of `ENCODERS`; for IRT's recipe, of those of `hypjax.config.irt`.
    released: bool = False  # Whether it takes as many steps as the released commands.
    frozen: bool = False  # Whether only a head is trained, see `train_head`.
    last: bool = False  # Whether the encoder's last blocks are trained, too.


def parse_variant(name: str, extra: Sequence[str] = (), *, with_irt: bool = False) -> Variant:
    """Parses a variant, such as 'hyp-dino,released'; a suggestion follows an unknown one."""
    valid = [one + suffix for suffix in ("", _RELEASED) for one in (*VARIANTS, *extra)]
    # Of these there are no released commands.
    others = (*LOSS_VARIANTS, *HIER_VARIANTS, *RECENT_VARIANTS)
    valid += (*others, *(one + FROZEN for one in (*VARIANTS, *extra, *others)))
    valid += LAST_VARIANTS
    valid += IRT_VARIANTS if with_irt else ()
    if name not in valid:
        raise variant_error(name, valid)
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


def choose_loss(config: ConfigDict, name: str, *, proxy_rate: float) -> None:
    """Chooses a loss of `LOSSES`, on the sphere, by default settings but its proxies' rate."""
    choose_objective(config, LOSSES[name])
    config.objective.space = "sphere"
    if "proxy_rate" in config.objective:
        config.objective.proxy_rate = proxy_rate


def choose_mix(config: ConfigDict) -> None:
    """Chooses HypMix as for CUB; the head is scored by cosine, as in the paper, and as trained."""
    choose_objective(config, "hypmix")
    config.eval.spaces.head = ("sphere", "objective")


def choose_hier(config: ConfigDict) -> None:
    """Chooses HIER on top of Proxy-Anchor for an encoder that is trained from scratch.

    The rates of the paper are for fine-tuning at a far smaller learning rate, and its numbers of
    proxies and triplets would take longer to compute than such an encoder.
    """
    choose_objective(config, "hier+proxy_anchor")
    config.objective.proxy_rate = config.objective.hier_rate = 1.0
    _shrink_hier(config)


def _shrink_hier(config: ConfigDict) -> None:
    config.objective.hier_proxies, config.objective.hier_triplets = 128, 10


def choose_irt(config: ConfigDict, *, koleo_weight: float, margin: float = 0.5) -> None:
    """Chooses the loss of IRT (El-Nouby et al., 2021), with a memory of all training images."""
    choose_objective(config, "contrastive")
    config.objective.space = "sphere"
    config.objective.margin = margin
    config.objective.memory = 1.0
    config.objective.koleo_weight = koleo_weight


def hyp_vit(variant: Variant) -> ConfigDict:
    """Returns the recipe of a variant for any dataset.

    A variant of another loss differs in the objective alone, unless it is trained by the recipe of
    HIER or IRT, see `hypjax.config.hier` and `hypjax.config.irt`: encoder, head, views, batches,
    optimiser and length are those of Hyp-ViT. So it is in the paper of HypMix; the combinations
    with the other losses are not published.

    The dataset's file adds batch size, steps, K and, for CUB, the test view. All other fields have
    their defaults, see `hypjax.config.default_config`.
    """
    encoder = ENCODERS[variant.encoder.removesuffix("-distilled")]
    config = default_config()
    config.variant = variant.name
    published = published_weights(encoder.weights)
    config.data.mean, config.data.std = published.mean, published.std
    config.model.architecture = encoder.architecture
    config.model.weights = encoder.weights
    config.model.pooling = encoder.pooling
    config.model.eval_pooling = encoder.eval_pooling
    if variant.space == "mix":
        choose_mix(config)
    elif variant.space in HIER:
        choose_objective(config, HIER[variant.space])
        config.objective.space = "poincare"
        if "proxy_rate" in config.objective:
            config.objective.proxy_rate = 1e4
    elif variant.space in KOLEO_WEIGHTS:
        choose_irt(config, koleo_weight=KOLEO_WEIGHTS[variant.space])
    elif variant.space in LOSSES:
        # HIER (Kim et al., CVPR 2023) fine-tunes the same encoders with Proxy-Anchor at this
        # factor. For other losses of proxies, and this batch and schedule, it is our choice.
        choose_loss(config, variant.space, proxy_rate=1e4)
    elif variant.space in SPACES:
        config.objective.space = SPACES[variant.space]
        # Ball: paper and code. Sphere: the published runs divide the cosine by 0.1. With D =
        # 2 − 2cos (Eq. 4), −D / 0.2 is cos / 0.1 minus a constant, which cancels in the softmax.
        # (The paper's "τ = 0.1" contradicts its Eq. 4.)
        config.objective.temperature = 0.2
    config.optim.learning_rate = encoder.learning_rate
    config.optim.layer_decay = encoder.layer_decay
    if not is_transformer(encoder.architecture):  # There is no patch projection to freeze.
        config.optim.frozen = ()
    spread_decoding(config)
    return config


def train_head(config: ConfigDict) -> None:
    """Trains the head alone, on features that are computed once, in batches that fit them.

    Started from principal components, with a small learning rate, a head finds unseen classes
    better than the encoder does; docs/results.md has the measurements, which a head from random
    weights does not reach, nor one of 128 dimensions.
    """
    if config.objective.name.endswith("pairwise_cross_entropy"):
        config.objective.temperature = 0.1  # Better than 0.2 with few classes, in both spaces.
    config.model.head_dim = create_encoder(config.model.architecture).dim
    config.model.head_init = "pca"
    config.model.pooling = config.model.eval_pooling
    config.optim.frozen = ("encoder",)
    config.optim.learning_rate = 1e-4
    for field in ("proxy_rate", "hier_rate"):  # So that proxies learn at HIER's rate.
        if field in config.objective:
            config.objective[field] *= 0.1
    if "hier_rate" in config.objective:
        _shrink_hier(config)  # The paper's numbers would take most of the time.
    config.optim.schedule = "cosine"
    config.optim.warmup_steps = None
    config.train.cached_features = True
    config.run.eval_batch_size = 64  # As fast on a CPU as 256, of which it would hold 9 GB.
    config.train.batch_size = None
    config.train.samples_per_class = None
    config.train.total_steps = None


def train_last_blocks(config: ConfigDict, encoder: str) -> None:
    """Trains the head and the encoder's last blocks, on what the blocks below compute once."""
    train_head(config)
    config.optim.frozen = tuple(f"model/encoder/{name}" for name in LOWER[encoder])
    config.optim.learning_rate = 3e-4
    # At the blocks' rate, the head loses what it begins with before they have gained.
    config.optim.groups = (("head", 0.1, None, 0),)
    for field in ("proxy_rate", "hier_rate"):  # Proxies learn as fast as those of a head alone.
        if field in config.objective:
            config.objective[field] /= 3


def spread_decoding(config: ConfigDict) -> None:
    """Sets the number of processes that decode photos.

    One core decodes and crops about 400 photos per second, so all cores are needed. On few cores
    threads are faster: on two cores 690 photos per second, against 560 with two processes.
    """
    cores = machine.usable_cores()
    config.run.workers = min(8, cores) if cores > 4 else 0
