"""The recipes of Hyp-ViT and Sph-ViT (Ermolov et al., CVPR 2022), shared by all datasets.

HypMix (Yue et al., WACV 2024) and other losses are trained by the same recipe. A file in `configs/`
parses its variant, starts from `hyp_vit`, sets what its dataset needs, and ends with `specialise`.
Numbers are the paper's; comments say where the authors' released code differs.
"""

import functools
from typing import NamedTuple

from ml_collections import ConfigDict

from hypjax.config import hier, irt, variants
from hypjax.config.defaults import choose_objective, default_config
from hypjax.config.variants import HIER, KOLEO_WEIGHTS, LOSSES, LOWER_LAYERS, Variant
from hypjax.models import create_encoder
from hypjax.models.architectures import is_transformer, published_weights
from hypjax.system import machine

LETTER_VARIANTS = ("hyp", "sph", "mix", "moco", "hier", "happier", *KOLEO_WEIGHTS, *LOSSES)


class PretrainedEncoder(NamedTuple):
    """A pretrained encoder, as the papers fine-tune it."""

    weights: str  # timm's name.
    learning_rate: float  # Constant.
    pooling: str = "cls"
    eval_pooling: str = ""  # Pooling in evaluation; '': as in training.
    layer_decay: float = 1.0  # Value of `optim.layer_decay`.


# Recent encoders, untried on full datasets. Rates are our choice: DINO's for encoders trained
# without labels or on texts, with CLIP's layer decay (Dong et al., 2022: 0.6 to 0.75).
_RECENT = functools.partial(PretrainedEncoder, learning_rate=1e-5, layer_decay=0.75)
# The paper and the released code have the same learning rates.
ENCODERS = {
    # Pretrained on ImageNet-21k, then ImageNet-1k.
    "vit": PretrainedEncoder("vit_small_patch16_224.augreg_in21k_ft_in1k", 3e-5),
    # The released code trains on the class token and evaluates the mean of the class and the
    # distillation token, since its version of timm returned these.
    "deit": PretrainedEncoder(
        "deit_small_distilled_patch16_224.fb_in1k", 3e-5, eval_pooling="cls_dist_mean"
    ),
    "dino": PretrainedEncoder("vit_small_patch16_224.dino", 1e-5),
    "dino-patch8": PretrainedEncoder("vit_small_patch8_224.dino", 1e-5),
    # HIER; BatchNorm keeps the statistics of the weights.
    "resnet50": PretrainedEncoder("resnet50.tv_in1k", 1e-4, pooling="avg_max"),
    "dinov2": _RECENT("vit_small_patch14_dinov2.lvd142m"),
    # The rate of the lowest block is that of 12 blocks.
    "dinov2-large": _RECENT("vit_large_patch14_dinov2.lvd142m", layer_decay=0.75**0.5),
    "dinov2-giant": _RECENT("vit_giant_patch14_dinov2.lvd142m", layer_decay=0.75**0.3),
    "dinov3": _RECENT("vit_small_patch16_dinov3_qkvb.lvd1689m"),
    "siglip2": _RECENT("vit_base_patch16_siglip_224.v2_webli", pooling="map"),
    "clip": _RECENT("vit_base_patch16_clip_quickgelu_224.openai"),
    "lite": PretrainedEncoder("tf_efficientnet_lite0.in1k", 1e-4, pooling="avg"),
}


# Spaces of images and captions, by variant; those of the models of `_as_published`, too.
CAPTION_SPACES = {**variants.HYP_VIT_SPACES, "lorentz": "lorentz", "product": "product"}
CAPTION_SPACES |= {"meru": "lorentz", "hycoclip": "lorentz", "phyclip": "product"}
BOXED = ("hycoclip", "phyclip")  # Variants that train on boxes of images, too.
_FACTORS = 8  # Hyperboloids in PHyCLIP's product. The paper has 64, which take long to compile.


def choose_loss(config: ConfigDict, loss: str, *, proxy_rate: float) -> None:
    """Chooses the objective and the space of a variant's loss.

    `proxy_rate` is the factor of the proxies' learning rate, for losses with proxies.
    """
    choose_objective(config, variants.OBJECTIVE_OF_LOSS[loss])
    config.objective.space = "poincare" if loss in ("hyp", "mix", "moco", *HIER) else "sphere"
    if loss == "lhier":
        config.objective.update(space="lorentz", learn_c=True, hier_optimizer="riemannian")
        config.objective.max_distance = 9.56  # 1.2·arcosh(1/(2·1.2e-7))/2, as in later releases.
    if "proxy_rate" in config.objective:
        config.objective.proxy_rate = proxy_rate
    if loss == "mix":  # The head is scored by cosine, as in the paper, and in the fused space.
        config.eval.spaces.head = ("sphere", "objective")
    if loss == "moco":  # He et al., CVPR 2020, for the decay; Hyp-ViT's τ and the length are ours.
        config.objective.update(memory_only=True, memory=1.0, memory_decay=0.999)
    if loss in KOLEO_WEIGHTS:
        config.objective.update(memory=1.0, koleo_weight=KOLEO_WEIGHTS[loss])


def hyp_vit(variant: Variant) -> ConfigDict:
    """Returns the part of a variant's recipe that all datasets share.

    The dataset's file adds batch size, steps, K and, for CUB, the test view. A loss other than
    Hyp-ViT's changes only the objective, as in the paper of HypMix; `specialise` applies the
    recipes of HIER and IRT.
    """
    encoder = ENCODERS[variant.encoder.removesuffix("-distilled")]
    config = default_config()
    config.variant = variant.name
    scaling = published_weights(encoder.weights)
    assert scaling is not None, f"no pixel scaling is known for {encoder.weights}"
    config.data.mean, config.data.std = scaling.mean, scaling.std
    config.model.architecture = encoder.weights.partition(".")[0]
    config.model.weights = encoder.weights
    config.model.pooling = encoder.pooling
    config.model.eval_pooling = encoder.eval_pooling or encoder.pooling
    # HIER (Kim et al., CVPR 2023) fine-tunes the same encoders with Proxy-Anchor at this factor.
    # For other losses with proxies, and for this batch and schedule, the factor is our choice.
    choose_loss(config, variant.loss, proxy_rate=1e4)
    config.optim.learning_rate = encoder.learning_rate
    config.optim.layer_decay = encoder.layer_decay
    if not is_transformer(config.model.architecture):  # There is no patch projection to freeze.
        config.optim.frozen = ()
    spread_decoding(config)
    return config


def specialise(
    config: ConfigDict,
    variant: Variant,
    hier_schedule: hier.Schedule | None = None,
    irt_schedule: irt.Schedule | None = None,
) -> None:
    """Changes a dataset's recipe to HIER's or IRT's, or as the variant's suffix says."""
    if hier_schedule and hier.follows(variant):
        hier.use(config, variant, hier_schedule)
    if irt_schedule and irt.follows(variant):
        irt.use(config, variant, irt_schedule)
    # ResNet-50 keeps HIER's learning rate for CUB and Cars, but has its usual pooling.
    unlabelled_resnet = variant.suffix == "unlabelled" and variant.encoder == "resnet50"
    if variant.suffix == "hyp-vit" or unlabelled_resnet:
        config.model.pooling = config.model.eval_pooling = "avg"
    if variant.suffix == "unlabelled":
        train_without_labels(config)
    if variant.suffix == "frozen":
        train_head(config)
    if variant.suffix == "last":
        _train_last_blocks(config, variant.encoder)


def train_without_labels(config: ConfigDict) -> None:
    """Trains without labels: two views of each image of a batch stand for a class.

    Hyp-ViT's supplement crops, mirrors, blurs and changes colours. The numbers are MoCo v2's (Chen
    et al., 2020).
    """
    config.train.update(unlabelled=True, samples_per_class=2)
    config.train.batch_size -= config.train.batch_size % 2
    config.data.update(colour_jitter=(0.4, 0.4, 0.4, 0.1), grey=0.2, blur=0.5)


def train_head(config: ConfigDict) -> None:
    """Trains only the head, on cached features; batches and steps are fitted to the dataset.

    A head that starts from principal components and has a small learning rate retrieves unseen
    classes better than the encoder. A head that starts from random weights, or has 128 dimensions,
    does not (docs/results/photographs.md).
    """
    _start_from_components(config)
    config.optim.update(frozen=("encoder",), learning_rate=1e-4)
    _divide_proxy_rates(config, 10)  # Proxies keep the rate that they have in HIER.
    if "hier_rate" in config.objective:  # The paper's numbers would take most of the time.
        config.objective.update(hier_proxies=128, hier_triplets=10)
    config.train.cached_features = True
    config.train.update(batch_size=None, samples_per_class=None, total_steps=None)
    config.optim.warmup_steps = None


def captions(space: str) -> ConfigDict:
    """Returns the recipe for images and captions in a space: heads on two frozen encoders."""
    config = hyp_vit(Variant(space, "hyp", "lite"))
    choose_objective(config, "captions")
    train_head(config)
    config.objective.update(space=CAPTION_SPACES[space], learn=("temperature",))
    # Chosen on coarse classes of groceries that were held out of training: the head on texts starts
    # from random weights and learns 100 times as fast as that on images.
    config.optim.groups = (("model/towers_texts", 100.0, None, 0),)
    config.model.head_dim = 256
    if space == "product":
        config.objective.parts = ("poincare", "sphere")
    config.data.update(name="folder", image_size=192, resize=192)
    config.data.update(test_classes=0.25, validation_classes=0.1)
    config.model.text.update(kind="features", width=None, head="dense")
    if space == "sph":  # It has no cones.
        config.objective.update(entailment=0.0, temperature=0.2)
    elif space in ("meru", *BOXED):
        _as_published(config, space)
    else:  # Farther out, cones are too narrow to hold images, see docs/texts.md.
        config.model.text.max_norm = 0.4
    # Many images are the only ones of their class.
    config.train.sampling = "boxes" if space in BOXED else "shuffled"
    config.eval.ks = (1, 5, 10)
    config.eval.every = 50
    return config


def _as_published(config: ConfigDict, name: str) -> None:
    """Chooses the space, entailment and learned scalars of MERU, HyCoCLIP or PHyCLIP.

    α starts at 1/√dim and is part of the heads' kernels. PHyCLIP's distance is the mean over
    hyperboloids, each with its own c.
    """
    dim = config.model.head_dim
    curvatures: tuple[float, ...] = ()
    if name == "phyclip":
        dim, curvatures = dim // _FACTORS, (1.0,) * _FACTORS
        config.objective.update(parts=("lorentz",) * _FACTORS, weights=(1 / _FACTORS,) * _FACTORS)
        config.objective.summed = True
    config.objective.update(c=1.0, curvatures=curvatures, learn_c=True, c_bounds=(0.1, 10.0))
    config.objective.update(clip_radius=None, feature_scale=0.5 / dim**0.5)  # `Lorentz` doubles it.
    config.objective.update(entailment=0.2, temperature=0.07)
    config.model.text.max_norm = None


def _is_like(objective: ConfigDict, name: str) -> bool:
    """Whether a space is MERU's or HyCoCLIP's hyperboloid, or PHyCLIP's product, already."""
    is_product = objective.space == "product" and {*objective.parts} == {"lorentz"}
    is_of_kind = is_product and objective.summed if name == "phyclip" else not is_product
    return objective.clip_radius is None and is_of_kind


def caption_towers(model: ConfigDict, space: str = "") -> ConfigDict:
    """Returns the recipe that fine-tunes both towers of a model of images and texts on captions.

    Args:
        model: The model's configuration, by `hypjax.convert --format=hypjax` or of a run.
        space: A key of `CAPTION_SPACES`; by default the model's own space, temperature and c, and
            of a run also its entailment.
    """
    config = default_config("captions")
    config.model = model.model.copy_and_resolve_references()
    config.model.update(load_head=True, head_init="orthogonal")
    for name in ("image_size", "resize", "test_view", "channels", "mean", "std"):
        config.data[name] = model.data[name]
    own, chosen = model.objective.space, CAPTION_SPACES.get(space)
    is_published = space in ("meru", *BOXED)
    keeps_own = chosen in (None, own) and (not is_published or _is_like(model.objective, space))
    if keeps_own:  # A run's fields, or the space and the temperature of weights.
        names = {*config.objective} & {*model.objective} - {"name", "learn"}
        config.objective.update({name: model.objective[name] for name in names})
        if model.objective.name != "captions" and own != "sphere":
            config.objective.update(learn_c=True, c_bounds=(0.1, 10.0))  # As in MERU.
    elif is_published:
        config.objective.space = chosen
        _as_published(config, space)
    else:
        config.objective.space = chosen
        config.objective.parts = ("poincare", "sphere") if space == "product" else ()
        config.model.text.max_norm = None if space == "sph" else 0.4  # As for heads.
        config.objective.temperature = 0.2 if space == "sph" else 0.07
    if config.objective.space == "sphere":  # It has no cones.
        config.objective.entailment = 0.0
    config.objective.learn = ("temperature",)
    # The rate and the gentle crops of open_clip's fine-tuning; no mirroring, which swaps left and
    # right in captions. As in all recipes here, decay acts on biases and gains, too.
    config.optim.update(learning_rate=1e-5, schedule="cosine", warmup_steps=None, clip_norm=1.0)
    config.optim.update(weight_decay=0.1, b2=0.98, eps=1e-6, frozen=())
    is_boxed = space in BOXED or (not space and model.train.sampling == "boxes")
    config.train.sampling = "boxes" if is_boxed else "shuffled"
    config.train.update(batch_size=None, total_steps=None, samples_per_class=None)
    encoders = "model/encoder/*block*", "model/towers_texts/encoder/*block*"
    config.train.lora_targets = encoders
    config.data.update(name="folder", crop_area=(0.9, 1.0), flip=0.0)
    config.data.update(test_classes=0.25, validation_classes=0.1)
    config.eval.update(ks=(1, 5, 10), every=50)
    config.run.eval_batch_size = 64
    return config


def is_brief(variant: Variant) -> bool:
    """Whether a variant, of groceries or cars, trains by `fine_tune_briefly`."""
    return (
        variant.encoder == "lite" and variant.loss in ("hyp", "sph", "mix") and not variant.suffix
    )


def fine_tune_briefly(config: ConfigDict) -> None:
    """Trains a small encoder and its head on photographs of 128 pixels, in minutes on a CPU.

    Measured on groceries and cars with EfficientNet-Lite0 (docs/results/fine-tuning.md).
    """
    _start_from_components(config)
    _learn_head_slowly(config)
    config.data.image_size = config.data.resize = 128
    config.optim.warmup_steps = 8
    config.train.update(batch_size=64, samples_per_class=4, total_steps=80)


def _train_last_blocks(config: ConfigDict, encoder: str) -> None:
    """Trains the head and the encoder's last blocks, on cached outputs of the lower blocks."""
    train_head(config)
    _learn_head_slowly(config)
    config.optim.frozen = tuple(f"model/encoder/{name}" for name in LOWER_LAYERS[encoder])
    _divide_proxy_rates(config, 3)  # Proxies learn as fast as with a frozen encoder.


def _start_from_components(config: ConfigDict) -> None:
    """Starts the head from principal components; the learning rate falls along a cosine."""
    if config.objective.name.endswith("pairwise_cross_entropy"):
        config.objective.temperature = 0.1  # Better than 0.2 with few classes, in both spaces.
    config.model.head_dim = create_encoder(config.model.architecture).dim
    config.model.head_init = "pca"
    config.model.pooling = config.model.eval_pooling
    config.optim.schedule = "cosine"
    config.run.eval_batch_size = 64  # As fast on a CPU as 256, which would take 9 GB of memory.


def _learn_head_slowly(config: ConfigDict) -> None:
    """Trains the encoder at 3e-4, and the head at a tenth of it."""
    config.optim.learning_rate = 3e-4
    # At the encoder's rate, the head forgets its principal components before the encoder improves.
    config.optim.groups = (("head", 0.1, None, 0),)


def _divide_proxy_rates(config: ConfigDict, divisor: float) -> None:
    """Divides the factors by which proxies learn faster than the model."""
    for field in ("proxy_rate", "hier_rate"):
        if field in config.objective:
            config.objective[field] /= divisor


def letters(variant: str) -> ConfigDict:
    """Returns the recipe for letters: a small Vision Transformer from scratch, tuned on glyphs."""
    if variant not in LETTER_VARIANTS:
        raise variants.variant_error(variant, LETTER_VARIANTS)
    config = default_config()
    config.variant = variant
    config.data.update(channels=1, image_size=32, resize=32)
    # Validation Recall@1 is 0.77 after 240 steps, at a learning rate of 1e-3; with areas from 0.8
    # it is 0.67, since smaller crops need longer training.
    config.data.update(crop_area=(0.9, 1.0), crop_ratio=(0.95, 1.05))
    config.data.flip = 0.0  # A mirrored letter is another letter.
    config.model.update(architecture="vit", patch_size=8, width=128, depth=4, num_heads=4)
    # Proxy-Anchor's validation Recall@1 is 0.837 at this factor, and 0.816 at 10. The other
    # settings were tuned for Hyp-ViT's loss in the ball.
    choose_loss(config, variant, proxy_rate=1.0)
    objective, optim = config.objective, config.optim
    optim.learning_rate = 2e-3  # Validation Recall@1 is 0.888; at 1e-3 0.83 after 450 steps.
    if variant == "hier":
        objective.update(hier_rate=1.0, hier_proxies=128, hier_triplets=10)
    elif variant == "moco":  # A model from scratch outruns a slower teacher and a longer queue.
        objective.update(memory=1024.0, memory_decay=0.99)
        optim.learning_rate = 5e-4  # Validation: 0.32 after 150 steps; 2e-3 collapses.
    elif variant in KOLEO_WEIGHTS:
        objective.margin = 0.9  # With 0.7 the loss diverges at this learning rate.
    optim.update(schedule="cosine", warmup_steps=50, frozen=())  # Nothing is pretrained.
    config.train.update(total_steps=500, samples_per_class=2)
    config.eval.every = 50
    return config


def spread_decoding(config: ConfigDict) -> None:
    """Sets the number of processes that decode photos; 0 uses threads.

    One core decodes and crops about 400 photos per second, so up to 8 processes share the work.
    On 4 cores or fewer, threads suffice: on two cores 690 photos per second, against 560 with
    two processes.
    """
    cores = machine.usable_cores()
    config.run.workers = min(8, cores) if cores > 4 else 0
