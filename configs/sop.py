"""Stanford Online Products: retrieval of unseen products, with Hyp-ViT and Sph-ViT.

Variants are those of `configs/cub.py`, such as `hyp-dino`, the default. In `mix`, λ = 8. `happier`,
short for `happier-resnet50`, follows HAPPIER (Ramzi et al., ECCV 2022), whose results it does not
reproduce; with other encoders, such as `happier-dino`, only its loss and batches are HAPPIER's.
"""

from ml_collections import ConfigDict

from hypjax.config import happier, hier, irt, recipes, variants

_HIER = hier.Schedule(330, 150, 5, 1e-4, 100.0, 6e-4, (0.3, 25))
_IRT = irt.Schedule(35_000, "drawn_classes")
_HAPPIER = happier.Schedule(5 * 66, 100, 5, 256)  # Pairs of 12 super-classes.
_SHORT = {"happier": "happier-resnet50"}


def get_config(variant: str = "hyp-dino") -> ConfigDict:
    """Returns the configuration of a variant."""
    chosen = variants.parse_variant(
        variant, short=_SHORT, released=True, with_irt=True, with_coarse=True
    )
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
    recipes.specialise(config, chosen, _HIER, _IRT, _HAPPIER)
    return config
