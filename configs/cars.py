"""Cars-196: models of cars the model has never seen, by Hyp-ViT and Sph-ViT.

Variants: `hyp` (Poincaré ball) or `sph` (sphere), then `-vit`, `-deit` or `-dino` for the weights
that training starts from; by default `hyp-dino`. `hyp-dino-patch8` cuts images into patches of 8×8
pixels (the paper's Table 4). `,released` behind any of them trains as long as the released commands
do: `configs/cars.py:sph-vit,released`.
"""

from ml_collections import ConfigDict

from hypjax.config import recipes


def get_config(variant: str = "hyp-dino") -> ConfigDict:
    """Returns the configuration of a variant."""
    chosen = recipes.parse_variant(variant, extra=("hyp-dino-patch8",))
    config = recipes.hyp_vit(chosen)
    config.data.name = "cars196"
    config.train.batch_size = 882  # The paper's 900 would be 100 classes; there are 98,
    config.train.samples_per_class = 9  # and the paper takes 9 images of each.
    if chosen.encoder == "dino-patch8":
        config.train.batch_size = 120  # Paper, which does not say of how many classes;
        config.train.samples_per_class = 2  # 120 is no multiple of 9.
    # Paper; the released commands run 300 epochs of one batch. Taken to hold for 8×8 patches too.
    config.train.total_steps = 300 if chosen.released else 600
    config.eval.ks = (1, 2, 4, 8)  # Paper, as is usual for this dataset.
    config.run.checkpoint_every = 100
    return config
