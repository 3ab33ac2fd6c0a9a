"""The recipes of Hyp-ViT and Sph-ViT (Ermolov et al., CVPR 2022): what its datasets share.

A file in `configs/` parses its variant, starts from `hyp_vit`, and says what is its dataset's own.
Numbers are the paper's; where the code that its authors released differs, that is told beside.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from ml_collections import ConfigDict

from hypjax.config.defaults import default_config
from hypjax.config.files import variant_error
from hypjax.system.cores import usable_cores

SHORTER_SIDES = {"cub200": 256}  # Before the test view's crop, where it is not the crop's side.
SPACES = {"hyp": "poincare", "sph": "sphere"}

_HALF = (0.5, 0.5, 0.5)
_IMAGENET_MEAN, _IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_RELEASED = ",released"


@dataclasses.dataclass(frozen=True)
class PretrainedEncoder:
    """An encoder as the paper fine-tunes it.

    Attributes:
        architecture: timm's name of it.
        weights: timm's name of what it starts from.
        learning_rate: It never changes during a run.
        mean: Of the pixels, as the weights expect them.
        std: Their deviation.
        eval_pooling: Of tokens, in evaluation; training uses the class token.
    """

    architecture: str
    weights: str
    learning_rate: float
    mean: tuple[float, ...] = _IMAGENET_MEAN
    std: tuple[float, ...] = _IMAGENET_STD
    eval_pooling: str = "cls"


# Learning rates are the paper's and the released code's, which agree; pixel scaling is that of the
# weights, as timm states it.
ENCODERS = {
    "vit": PretrainedEncoder(  # On ImageNet-21k, then on ImageNet-1k.
        "vit_small_patch16_224",
        "vit_small_patch16_224.augreg_in21k_ft_in1k",
        learning_rate=3e-5,
        mean=_HALF,
        std=_HALF,
    ),
    "deit": PretrainedEncoder(
        "deit_small_distilled_patch16_224",
        "deit_small_distilled_patch16_224.fb_in1k",
        learning_rate=3e-5,
        # The released code trains on the class token and scores the mean of class and distillation
        # tokens: what the timm of its day returned in training and in evaluation.
        eval_pooling="cls_dist_mean",
    ),
    "dino": PretrainedEncoder(
        "vit_small_patch16_224", "vit_small_patch16_224.dino", learning_rate=1e-5
    ),
    "dino-patch8": PretrainedEncoder(
        "vit_small_patch8_224", "vit_small_patch8_224.dino", learning_rate=1e-5
    ),
}
VARIANTS = tuple(f"{space}-{encoder}" for space in SPACES for encoder in ("vit", "deit", "dino"))


class Variant(NamedTuple):
    """Which of a dataset's experiments is meant.

    Attributes:
        name: As the user wrote it.
        space: One of `SPACES`.
        encoder: One of `ENCODERS`.
        released: Whether to train as long as the released commands do, and not as the paper says.
    """

    name: str
    space: str
    encoder: str
    released: bool


def parse_variant(name: str, extra: Sequence[str] = ()) -> Variant:
    """Reads a variant, such as 'hyp-dino', or 'hyp-dino,released'.

    Args:
        name: What stands behind the configuration file's colon.
        extra: Variants of this dataset beside `VARIANTS`.

    Raises:
        UserError: There is no such variant; the message names the nearest.
    """
    valid = [one + suffix for suffix in ("", _RELEASED) for one in (*VARIANTS, *extra)]
    if name not in valid:
        raise variant_error(name, valid)
    space, _, encoder = name.removesuffix(_RELEASED).partition("-")
    return Variant(name, space, encoder, released=name.endswith(_RELEASED))


def hyp_vit(variant: Variant) -> ConfigDict:
    """The recipe of a variant, without what depends on the dataset.

    Its batch size, steps, K and, for CUB, test view are the dataset's; all that is not set here is
    in `hypjax.config.default_config`.
    """
    encoder = ENCODERS[variant.encoder]
    config = default_config()
    config.variant = variant.name
    config.data.mean, config.data.std = encoder.mean, encoder.std
    config.model.architecture = encoder.architecture
    config.model.weights = encoder.weights
    config.model.pooling = "cls"
    config.model.eval_pooling = encoder.eval_pooling
    config.objective.space = SPACES[variant.space]
    # Ball: paper and code. Sphere: the published runs divide the cosine by 0.1; −D / 0.2 with
    # D = 2 − 2cos (Eq. 4) is cos / 0.1 less a constant, which the softmax does not see. (The
    # paper's "τ = 0.1" and its Eq. 4 do not fit together.)
    config.objective.temperature = 0.2
    config.optim.learning_rate = encoder.learning_rate
    # A core decodes and crops some 400 photos a second, so that all are needed. On a few cores
    # threads are the faster ones: 690 photos a second on two, where two processes make 560.
    cores = usable_cores()
    config.run.workers = min(8, cores) if cores > 4 else 0
    return config
