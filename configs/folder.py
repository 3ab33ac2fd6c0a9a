"""Your own images, from a folder with one sub-folder per class, or from a table.

    python -m hypjax.main --config=configs/folder.py --config.data.path=photos/

Variants: `hyp` (Poincaré ball) and `sph` (sphere) train a small Vision Transformer from scratch,
with sizes, schedule and learning rate for that. `hyp-vit`, `sph-dino` and so on (with `-vit`,
`-deit` or `-dino`) fine-tune a pretrained ViT-S at 224 pixels by the published recipe, which
requires an accelerator. `hyp-dino,frozen` and so on train only the head, on features of the
pretrained encoder that are computed once: minutes on a CPU.
"""

from ml_collections import ConfigDict

from hypjax.config import default_config, recipes, variant_error

_FROZEN = ",frozen"
VARIANTS = ("hyp", "sph", *recipes.VARIANTS, *(name + _FROZEN for name in recipes.VARIANTS))


def get_config(variant: str = "hyp") -> ConfigDict:
    """Returns the configuration of a variant."""
    if variant not in VARIANTS:
        raise variant_error(variant, VARIANTS)
    if variant.endswith(_FROZEN):
        return head_only(variant)
    if variant in recipes.VARIANTS:
        return fine_tuned(variant)
    config = default_config()
    config.variant = variant

    config.data.name = "folder"
    config.data.image_size = 64
    config.data.resize = 64
    config.data.crop_area = (0.5, 1.0)
    config.data.test_classes = 0.25
    config.data.validation_classes = 0.1

    config.model.architecture = "vit"
    config.model.patch_size = 8
    config.model.width = 128
    config.model.depth = 4
    config.model.num_heads = 4

    if variant == "sph":
        config.objective.space = "sphere"

    # At 2e-3, photos collapse: the loss starts at 4 to 5 times its level at chance, because
    # distances over the temperature reach 45, and the easiest way to lower the loss is to
    # collapse all embeddings.
    config.optim.learning_rate = 5e-4
    config.optim.schedule = "cosine"
    config.optim.warmup_steps = None  # None fits the images; what is chosen is printed.
    config.optim.frozen = ()  # Nothing is pretrained.

    config.train.total_steps = None
    config.train.batch_size = None
    config.train.samples_per_class = None

    config.eval.every = 50
    return config


def fine_tuned(variant: str) -> ConfigDict:
    """Returns the published recipe for your own images, with smaller batches."""
    config = recipes.hyp_vit(recipes.parse_variant(variant))
    config.data.name = "folder"
    config.data.test_classes = 0.25
    config.data.validation_classes = 0.1
    config.train.total_steps = 500
    config.train.batch_size = None
    config.train.samples_per_class = None
    config.eval.every = 50
    return config


def head_only(variant: str) -> ConfigDict:
    """Returns the recipe that trains the head alone, on cached features."""
    config = fine_tuned(variant.removesuffix(_FROZEN))
    config.variant = variant
    config.model.pooling = config.model.eval_pooling
    config.optim.frozen = ("encoder",)
    config.optim.learning_rate = 1e-3
    config.optim.schedule = "cosine"
    config.optim.warmup_steps = None
    config.train.cached_features = True
    config.train.total_steps = None
    # Evaluation embeds images, which takes longer than training the head. So there are no
    # checkpoints to choose from, and no classes to choose them by.
    config.eval.every = 0
    config.data.validation_classes = 0.0
    return config
