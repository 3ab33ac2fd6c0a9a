"""CUB-200-2011: birds of classes the model has never seen, by Hyp-ViT and Sph-ViT.

Variants: `hyp` (Poincaré ball) or `sph` (sphere), then `-vit`, `-deit` or `-dino` for the weights
that training starts from; by default `hyp-dino`. `,released` behind it trains as long as the
released commands do: `configs/cub.py:sph-vit,released`.
"""

from ml_collections import ConfigDict

from hypjax.config import recipes


def get_config(variant: str = "hyp-dino") -> ConfigDict:
    """Returns the configuration of a variant."""
    chosen = recipes.parse_variant(variant)
    config = recipes.hyp_vit(chosen)
    config.data.name = "cub200"
    config.data.resize = 256  # Paper; the other datasets: 224.
    config.train.batch_size = 900  # Paper: all 100 training classes in every batch,
    config.train.samples_per_class = 9  # with 9 images each.
    # Paper; the released commands run 50 epochs of one batch.
    config.train.total_steps = 50 if chosen.released else 200
    config.eval.ks = (1, 2, 4, 8)  # Paper, as is usual for this dataset.
    config.run.checkpoint_every = 50
    return config
