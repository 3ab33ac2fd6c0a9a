"""The recipe of IRT (El-Nouby et al., 2021) for particular objects, trained on SfM-120k.

The paper gives encoders, data, tuples, epochs, λ, and Adam. Margin, learning rate, its decay and
the weight decay are those of the code on which IRT builds (Radenović et al., TPAMI 2019), whose
images keep their shape; IRT's are squashed to a square. Nothing is frozen and no gradient clipped,
and stochastic depth is off: neither mentions them.
"""

import math

from ml_collections import ConfigDict

from hypjax.config.choices import BENCHMARKS
from hypjax.config.defaults import choose_objective, default_config
from hypjax.config.irt import IMAGENET_MEAN, IMAGENET_STD
from hypjax.config.recipes import spread_decoding
from hypjax.config.variants import variant_error

# timm's names of the pretrained encoders, which end in the side of the images.
ENCODERS = {
    "deit-s": "deit_small_patch16_224",
    "deit-b": "deit_base_patch16_224",
    "deit-b-384": "deit_base_patch16_384",
}
# λ by kind. `hyp` is IRT_R in the ball, with a margin for its distances; no paper reports it.
KOLEO_WEIGHTS = {"irt-o": 0.0, "irt-l": 0.0, "irt-r": 4.0, "hyp": 4.0}
VARIANTS = tuple(f"{kind}-{encoder}" for kind in KOLEO_WEIGHTS for encoder in ENCODERS)


def choose_tuples(config: ConfigDict, kind: str) -> None:
    """Chooses the loss and the batches of a kind of `KOLEO_WEIGHTS`."""
    choose_objective(config, "tuple_contrastive")
    config.objective.koleo_weight = KOLEO_WEIGHTS[kind]
    config.train.sampling = "tuples"
    if kind == "hyp":
        config.objective.space, config.objective.margin = "poincare", 4.0
    else:
        config.objective.space = "sphere"


def recipe(variant: str) -> ConfigDict:
    """Returns the configuration of a variant, such as 'irt-r-deit-s'.

    `irt-o` is the pretrained encoder, which is only evaluated: it has no steps, and is scored on
    Revisited Oxford and Paris alone, so that SfM-120k need not be prepared.
    """
    if variant not in VARIANTS:
        raise variant_error(variant, VARIANTS)
    kind = next(kind for kind in KOLEO_WEIGHTS if variant.startswith(f"{kind}-"))
    encoder = ENCODERS[variant.removeprefix(f"{kind}-")]
    config = default_config()
    config.variant = variant
    data, model, optim, train = config.data, config.model, config.optim, config.train
    data.name, config.eval.benchmarks = "sfm120k", BENCHMARKS
    data.mean, data.std = IMAGENET_MEAN, IMAGENET_STD
    data.image_size = data.resize = int(encoder.rpartition("_")[2])
    data.train_view, data.test_view, data.flip = "resize_crop", "squash", 0.0
    model.architecture, model.weights = encoder, f"{encoder}.fb_in1k"
    model.pooling = model.eval_pooling = "cls"
    model.head = "none"
    choose_tuples(config, kind)
    train.batch_size = 5 * (2 + train.tuples.negatives)
    epoch = train.tuples.pairs // 5
    train.total_steps = 100 * epoch
    optim.name, optim.learning_rate = "adam", 5e-7
    # 1e-4 beside the sum of five losses, whose mean is taken here. Adam scales both alike.
    optim.weight_decay = 1e-4 / 5
    optim.schedule, optim.decay_every, optim.decay_factor = "step", epoch, math.exp(-0.01)
    optim.clip_norm, optim.frozen = None, ()
    config.eval.metrics, config.eval.ks = ("recall", "map", "mp"), (1, 5, 10)
    config.run.checkpoint_every = epoch
    spread_decoding(config)
    if kind == "irt-o":
        train.total_steps = 0
        data.name, *rest = BENCHMARKS
        config.eval.benchmarks = tuple(rest)
    return config
