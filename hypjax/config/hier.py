"""The recipe of HIER (Kim et al., CVPR 2023), shared by its datasets.

The recipe also trains Proxy-Anchor, which HIER extends, and ResNet-50. Numbers are from the paper
or its released code, unless comments say otherwise. Difference: the released code scales gradients
by the ball's inverse metric also without HIER; `pa` and `hyp-resnet50` do not. If all features are
clipped, that is a constant factor of 0.094, which Adam cancels up to its ε.
"""

from typing import NamedTuple

from ml_collections import ConfigDict

from hypjax.config.variants import HIER, HYP_VIT_SPACES, Variant


class Schedule(NamedTuple):
    """Settings that files in `configs/` choose for their dataset."""

    epoch: int  # Steps in an epoch: training images // 180.
    epochs: int
    frozen: int  # First epochs, in which the encoder is frozen.
    weight_decay: float
    head_rate: float  # Factor of the head's learning rate, for Transformers.
    resnet_rate: float  # Learning rate of ResNet-50.
    resnet_decay: tuple[float, int]  # Decay of that rate: a factor every so many epochs.


_LEARNING_RATES = {"vit": 1e-5, "deit": 1e-5, "dino": 5e-6}
# Encoders that the paper does not train have our choice, DINO's rate.
_LEARNING_RATES |= dict.fromkeys(("dinov2", "dinov2-large", "dinov2-giant"), 5e-6)
_LEARNING_RATES |= {"dinov3": 5e-6, "siglip2": 5e-6, "clip": 5e-6}


def follows(variant: Variant) -> bool:
    """Whether a variant is trained by this recipe."""
    is_baseline = variant.loss in HYP_VIT_SPACES and variant.encoder == "resnet50"
    has_other_recipe = variant.suffix in ("frozen", "last", "hyp-vit", "unlabelled")
    return (variant.loss in (*HIER, "pa") or is_baseline) and not has_other_recipe


def use(config: ConfigDict, variant: Variant, schedule: Schedule) -> None:
    """Changes Hyp-ViT's recipe to HIER's, but keeps the variant's loss."""
    optim, train = config.optim, config.train
    config.data.resize = 256  # Shorter side of the test view.
    config.model.update(head="norm_dense", head_dim=384)  # As in the paper's tables.
    optim.learning_rate = _LEARNING_RATES.get(variant.encoder, schedule.resnet_rate)
    optim.eps = 1e-4  # The authors train in half precision.
    optim.weight_decay = schedule.weight_decay
    optim.update(clip_norm=None, clip_value=10.0)
    # Each of the authors' two processes embeds 90 images, and computes the gradient of the loss of
    # all 180 with respect to its own 90. The mean of the two gradients, which updates the model, is
    # half of the loss's gradient. The gradient of proxies is not averaged.
    optim.gradient_factor = 0.5
    optim.groups = (("encoder", 1.0, None, schedule.frozen * schedule.epoch),)
    is_convolutional = variant.encoder in ("resnet50", "lite")
    if not is_convolutional and schedule.head_rate != 1:
        optim.groups += (("head", schedule.head_rate, None, 0),)
    train.update(batch_size=180, samples_per_class=2, sampling="drawn_classes", repeat_images=True)
    train.total_steps = schedule.epochs * schedule.epoch
    config.run.checkpoint_every = 10 * schedule.epoch
    if is_convolutional:
        config.data.crop_area = (0.08, 1.0)
        config.model.head_dim = 512
        optim.frozen = ()
        optim.schedule = "step"
        optim.decay_factor, decay_epochs = schedule.resnet_decay
        optim.decay_every = decay_epochs * schedule.epoch
        if variant.loss in HYP_VIT_SPACES:
            # The released command has 8 images a class and 90 in each process, no multiple of 8.
            train.update(batch_size=176, samples_per_class=8)
            config.objective.pair_weight = 1 / 8**2  # The code divides the sum of 56 pairs by 8².
