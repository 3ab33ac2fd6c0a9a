"""The recipe of HAPPIER (Ramzi et al., ECCV 2022), for datasets with coarse classes.

Loss and batches are the released code's. With ResNet-50 the recipe is, too, as far as fields say
it; other encoders, and heads on frozen ones, keep the recipe of Hyp-ViT. This is no reproduction:

- test images are resized without squashing them to 256 × 256 pixels, and cropped from there;
- the rate falls from the first step on, also while the encoder is fixed, and the proxies' falls to
  0 in place of a hundredth;
- the head's kernel starts semi-orthogonal, and ResNet-50's weights are timm's `tv_in1k`.
"""

from typing import NamedTuple

from ml_collections import ConfigDict

from hypjax.config.variants import HAPPIER, Variant

_RATE, _PROXY_RATE = 5e-5, 10.0  # Of Adam.


class Schedule(NamedTuple):
    """Settings that files in `configs/` choose for their dataset."""

    epoch: int  # Batches in an epoch: five for each pair of super-classes.
    epochs: int
    frozen: int  # First epochs, in which the encoder is fixed.
    batch_size: int


def follows(variant: Variant) -> bool:
    """Whether a variant has HAPPIER's loss, and so its batches."""
    return variant.loss == HAPPIER


def use(config: ConfigDict, variant: Variant, schedule: Schedule) -> None:
    """Changes Hyp-ViT's recipe to HAPPIER's batches, and with ResNet-50 to its recipe."""
    data, model, optim, train = config.data, config.model, config.optim, config.train
    train.sampling = "coarse_pairs"
    train.batch_size, train.samples_per_class = schedule.batch_size, 4
    if variant.encoder != "resnet50" or variant.suffix:
        return
    data.resize, data.crop_area = 256, (0.16, 1.0)
    model.head, model.head_dim = "norm_dense", 512
    model.pooling = model.eval_pooling = "avg"
    optim.name, optim.learning_rate, optim.weight_decay = "adam", _RATE, 1e-4
    optim.schedule, optim.clip_norm = "cosine", None
    optim.groups = (("head", 2.0, None, 0),)
    config.objective.proxy_rate = _PROXY_RATE / _RATE
    train.head_warmup_steps = schedule.frozen * schedule.epoch
    train.total_steps = schedule.epochs * schedule.epoch
    config.run.checkpoint_every = 10 * schedule.epoch
