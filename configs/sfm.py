"""Particular objects: trained on SfM-120k, scored on Revisited Oxford and Paris.

Variants: `irt-o`, `irt-l` or `irt-r` (El-Nouby et al., 2021) followed by `-deit-s`, `-deit-b`,
`-deit-b-384` or `-deit-b-384-distilled`; the default is `irt-r-deit-s`. `irt-o` is the pretrained
encoder, which is only evaluated, by `--mode=evaluate`; `irt-l` trains it on tuples with the
contrastive loss; `irt-r` adds differential entropy. `hyp` in place of `irt-r` trains in the
Poincaré ball, which no paper reports.

For 128 dimensions, as in the paper's Table 7, set `--config.eval.pca.encoder=128`, a PCA that is
fitted on SfM-120k; for `irt-o` also set `--config.data.name=sfm120k` and
`--config.eval.benchmarks="('roxford5k','rparis6k')"`.

Encoders, data, tuples, epochs, λ and Adam are the paper's. Margin, learning rate and its decay, and
weight decay are from the code on which IRT builds (Radenović et al., TPAMI 2019), whose images keep
their shape, whereas IRT's are squashed to a square. Nothing is frozen or clipped, and there is no
stochastic depth: paper and code mention none of them.
"""

import math

from ml_collections import ConfigDict

from hypjax.config import default_config, irt, recipes, variant_error
from hypjax.config.choices import BENCHMARKS

# timm's names of the pretrained encoders, which end in the side of the images.
ENCODERS = {
    "deit-s": "deit_small_patch16_224",
    "deit-b": "deit_base_patch16_224",
    "deit-b-384": "deit_base_patch16_384",
    "deit-b-384-distilled": "deit_base_distilled_patch16_384",
}
VARIANTS = {f"{kind}-{name}": (kind, name) for kind in irt.OBJECT_WEIGHTS for name in ENCODERS}


def get_config(variant: str = "irt-r-deit-s") -> ConfigDict:
    """Returns the configuration of a variant."""
    if variant not in VARIANTS:
        raise variant_error(variant, VARIANTS)
    kind, name = VARIANTS[variant]
    config = default_config()
    config.variant = variant
    irt.start_from(config, ENCODERS[name])
    irt.choose_tuples(config, kind)
    recipes.spread_decoding(config)
    data, optim, train = config.data, config.optim, config.train
    data.name, config.eval.benchmarks = "sfm120k", BENCHMARKS
    data.image_size = data.resize = int(ENCODERS[name].rpartition("_")[2])
    data.update(train_view="resize_crop", test_view="squash", flip=0.0)
    train.batch_size = 5 * (2 + train.tuples.negatives)
    epoch = train.tuples.pairs // 5
    train.total_steps = 100 * epoch
    optim.update(name="adam", learning_rate=5e-7)
    # The code's release of December 2020 has 1e-6 (1e-4 until June 2019); IRT, of February 2021,
    # gives none. The code adds the losses of five tuples, where hypjax takes their mean, so the
    # decay is divided by 5, too. Adam is invariant to their common scale.
    optim.weight_decay = 1e-6 / 5
    optim.update(schedule="step", decay_every=epoch, decay_factor=math.exp(-0.01))
    config.eval.metrics, config.eval.ks = ("recall", "map", "mp"), (1, 5, 10)
    config.run.checkpoint_every = epoch
    if kind == "irt-o":  # Scored on Revisited Oxford and Paris: SfM-120k need not be prepared.
        train.total_steps = 0
        data.name, *rest = BENCHMARKS
        config.eval.benchmarks = tuple(rest)
    return config
