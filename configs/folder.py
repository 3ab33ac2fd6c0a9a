"""Your own images, from a folder with one sub-folder per class, or from a table.

    python -m hypjax.main --config=configs/folder.py --config.data.path=photos/

The default variant is `hyp-dinov2` if there is an accelerator, and `hyp-lite,frozen` otherwise.
Variants:

* `hyp-vit`, `sph-dino` and the other losses and encoders of `configs/cub.py` fine-tune a pretrained
  encoder at 224 pixels by the published recipe, which requires an accelerator;
* `hyp-lite,frozen` and so on train only the head, on features that the pretrained encoder computes
  once: this takes minutes on a CPU for `-lite`, the small EfficientNet-Lite0;
* `hyp-lite,last` and `hyp-dinov2,last` also train the encoder's last blocks, on outputs that the
  blocks below compute once;
* `lite` and `dinov2` are short for `hyp-lite,frozen` and `hyp-dinov2,frozen`;
* `hyp-scratch` and `sph-scratch` train a small Vision Transformer from scratch, with sizes,
  schedule and learning rate for that.
"""

from ml_collections import ConfigDict

from hypjax.config import default_config, recipes, variants

_SCRATCH = tuple(f"{space}-scratch" for space in variants.HYP_VIT_SPACES)


def get_config(variant: str | None = None) -> ConfigDict:
    """Returns the configuration of a variant."""
    variant = variant or variants.variant_for_this_machine()
    variant = variants.FROZEN.get(variant, variant)
    config = from_scratch(variant) if variant in _SCRATCH else pretrained(variant)
    config.variant = variant
    config.data.name = "folder"
    config.data.test_classes = 0.25
    config.data.validation_classes = 0.1
    config.train.batch_size = None
    config.train.samples_per_class = None
    config.eval.every = 50
    return config


def from_scratch(variant: str) -> ConfigDict:
    """Returns the recipe of a small Vision Transformer with random weights."""
    config = default_config()
    config.data.image_size = 64
    config.data.resize = 64
    config.data.crop_area = (0.5, 1.0)

    config.model.architecture = "vit"
    config.model.patch_size = 8
    config.model.width = 128
    config.model.depth = 4
    config.model.num_heads = 4
    config.objective.space = variants.HYP_VIT_SPACES[variant.removesuffix("-scratch")]

    # At 2e-3, embeddings of photos collapse: the loss starts at 4 to 5 times its value at chance,
    # because distances divided by the temperature reach 45, and the easiest way to lower the loss
    # is to collapse all embeddings.
    config.optim.learning_rate = 5e-4
    config.optim.schedule = "cosine"
    config.optim.warmup_steps = None  # None: fitted to the images, and printed.
    config.optim.frozen = ()  # Nothing is pretrained.
    config.train.total_steps = None
    return config


def pretrained(variant: str) -> ConfigDict:
    """Returns a published recipe with 500 steps, or the recipe of a head on frozen features."""
    chosen = variants.parse_variant(variant, short=variants.FROZEN, further=_SCRATCH)
    config = recipes.hyp_vit(chosen)
    config.train.total_steps = 500
    recipes.specialise(config, chosen)
    return config
