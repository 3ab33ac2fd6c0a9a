"""Groceries: retrieval of unseen products in photos of a shop, on a CPU too.

    python -m hypjax.prepare --dataset=grocery
    python -m hypjax.main --config=configs/grocery.py:lite

The default variant is `hyp-dinov2` if there is an accelerator, and `lite` otherwise. Variants:

* `lite` and `dinov2`, short for `hyp-lite,frozen` and `hyp-dinov2,frozen`, train only a head, in
  minutes on a CPU, on features that the encoder computes once: EfficientNet-Lite0 at 192 pixels, or
  DINOv2's ViT-S at 126. All variants below also exist with `,frozen`. `hyp-lite,last` and
  `hyp-dinov2,last` also train the last blocks, on outputs that the blocks below compute once;
* `happier`, short for `happier-lite,frozen`, trains this head by HAPPIER's loss, on batches of two
  departments; `happier` also exists with other encoders, such as `happier-resnet50`;
* `hyp-lite`, `sph-lite` and `mix-lite` fine-tune EfficientNet-Lite0 at 128 pixels for 80 steps, in
  minutes on a CPU;
* `hyp-dino` and the other variants of `configs/cub.py`, except `,released`, fine-tune an encoder,
  which requires an accelerator.

`--config.data.name=grocery_icons` searches the shop's iconic pictures of all 81 products instead.
No paper reports these tasks.
"""

from ml_collections import ConfigDict

from hypjax.config import hier, irt, recipes, variants

_HIER = hier.Schedule(  # Not published; as for CUB.
    epoch=17,
    epochs=100,
    frozen=1,
    weight_decay=1e-2,
    head_rate=1.0,
    resnet_rate=1e-4,
    resnet_decay=(0.5, 5),
)
_IRT = irt.Schedule(2_000, "shuffled")
_SHORT = {**variants.FROZEN, "happier": "happier-lite,frozen"}
_SIDES = {"lite": 192, "dinov2": 126}  # Image sides for frozen encoders; 126: 9 × 9 patches.


def get_config(variant: str | None = None) -> ConfigDict:
    """Returns the configuration of a variant."""
    variant = variant or variants.variant_for_this_machine()
    chosen = variants.parse_variant(variant, short=_SHORT, with_irt=True, losses=("happier",))
    config = recipes.hyp_vit(chosen)
    config.data.name = "grocery"
    config.data.validation_classes = 0.2
    # As for CUB, with 32 of the 36 classes that are not held out; each has 35 photos or more.
    config.train.batch_size = 288
    config.train.samples_per_class = 9
    config.train.total_steps = 200
    recipes.specialise(config, chosen, _HIER, _IRT)
    if hier.follows(chosen) and config.train.samples_per_class == 2:
        config.train.samples_per_class = 6  # 30 classes; 2 images of each would need 90.
    if recipes.is_brief(chosen):
        recipes.fine_tune_briefly(config)
    if chosen.suffix:
        side = _SIDES.get(chosen.encoder, config.data.image_size)
        config.data.image_size = config.data.resize = side
    if chosen.loss == "happier":  # 16 classes, since any two departments have as many.
        config.train.sampling = "coarse_pairs"
        config.train.batch_size, config.train.samples_per_class = 64, 4
    config.eval.ks = (1, 2, 4, 8)
    config.eval.every = 50
    config.run.checkpoint_every = 50
    return config
