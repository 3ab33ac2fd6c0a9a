"""Scenes: retrieval of particular objects, rendered letters in cluttered pictures.

The small example of what `configs/sfm.py` does: it needs no download and no accelerator. Variants:
`irt-l` (contrastive loss of mined tuples), `irt-r` (and differential entropy), `irt-o` (neither:
the encoder before training, by `--mode=evaluate`), and `hyp` (`irt-r` in the Poincaré ball); the
default is `irt-r`. A small Vision Transformer is trained from scratch, so the published recipe for
fine-tuning does not apply: learning rate, schedule, λ and margins were chosen on the validation
classes.
"""

from ml_collections import ConfigDict

from hypjax.config import default_config, irt_objects, variant_error

VARIANTS = tuple(irt_objects.KOLEO_WEIGHTS)


def get_config(variant: str = "irt-r") -> ConfigDict:
    """Returns the configuration of a variant."""
    if variant not in VARIANTS:
        raise variant_error(variant, VARIANTS)
    config = default_config()
    config.variant = variant
    data, model, optim, train = config.data, config.model, config.optim, config.train

    data.name = "scenes"
    data.channels = 1
    data.image_size = data.resize = 40
    data.mean, data.std = (0.5,), (0.18,)  # Measured on the training images.
    data.train_view, data.test_view, data.flip = "area_crop", "squash", 0.0
    data.crop_area, data.crop_ratio = (0.7, 1.0), (0.9, 1.1)
    data.validation_classes = 60

    model.architecture = "vit"
    model.patch_size, model.width, model.depth, model.num_heads = 8, 128, 4, 4
    model.head_dim = 128

    irt_objects.choose_tuples(config, variant)
    optim.name, optim.learning_rate = "adam", 1e-3
    optim.weight_decay = 0.0
    optim.schedule, optim.warmup_steps = "cosine", 50
    optim.frozen = ()  # Nothing is pretrained.

    train.tuples.pairs, train.tuples.pool, train.tuples.negatives = 1_000, 2_000, 5
    train.batch_size = 20 * (2 + train.tuples.negatives)
    train.total_steps = 0 if variant == "irt-o" else 500
    config.eval.metrics, config.eval.ks = ("recall", "map", "mp"), (1, 5, 10)
    config.run.checkpoint_every = 50
    return config
