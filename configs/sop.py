"""Stanford Online Products: retrieval of unseen products, with Hyp-ViT and Sph-ViT.

Variants are those of `configs/cub.py`, such as `hyp-dino`, the default. In `mix`, λ = 8.
"""

from ml_collections import ConfigDict

from hypjax.config import hier, irt, recipes, variants

_HIER = hier.Schedule(330, 150, 5, 1e-4, 100.0, 6e-4, (0.3, 25))
_IRT = irt.Schedule(35_000, "drawn_classes")


def get_config(variant: str = "hyp-dino") -> ConfigDict:
    """Returns the configuration of a variant."""
    chosen = variants.parse_variant(variant, released=True, with_irt=True)
    config = recipes.hyp_vit(chosen)
    config.data.name = "sop"
    config.train.batch_size = 900  # Paper: 450 of the 11,318 training classes in a batch.
    config.train.samples_per_class = 2  # Paper; a class has 5.3 images on average.
    # Paper; the released commands run 200 epochs of 25 batches.
    config.train.total_steps = 5_000 if chosen.suffix == "released" else 25_000
    config.eval.ks = (1, 10, 100, 1000)  # Paper, as is usual for this dataset.
    if config.objective.name == "soft_triple":
        # Qian et al., ICCV 2019: 2 centres for small classes, where CUB and Cars have 10.
        config.objective.centres = 2
    if config.objective.name == "hypmix":
        config.objective.ball_weight = 8.0  # Yue et al., WACV 2024.
    config.run.checkpoint_every = 500
    recipes.specialise(config, chosen, _HIER, _IRT)
    return config
