"""In-Shop (DeepFashion): retrieval of unseen clothes, with Hyp-ViT and Sph-ViT.

Variants are the same as in `configs/cub.py`; the default is `hyp-dino`. In `mix`, λ = 8, which is
our choice.

Each of the paper's ablations (Table 5) changes one field of `hyp-vit`, at the same number of steps:

    launch/sweep.sh configs/inshop.py:hyp-vit objective.c 0.01 0.05 0.1 0.3 0.5 1.0
    launch/sweep.sh configs/inshop.py:hyp-vit model.head_dim 16 32 64 128
    launch/sweep.sh configs/inshop.py:hyp-vit train.batch_size 200 400 900 1600
"""

from ml_collections import ConfigDict

from hypjax.config import hier, irt, recipes, variants

_HIER = hier.Schedule(
    epoch=143,
    epochs=150,
    frozen=5,
    weight_decay=1e-4,
    head_rate=100.0,
    resnet_rate=6e-4,
    resnet_decay=(0.3, 20),
)
_IRT = irt.Schedule(35_000, "drawn_classes", memory=0.2, memory_decay=0.999)


def get_config(variant: str = "hyp-dino") -> ConfigDict:
    """Returns the configuration of a variant."""
    chosen = variants.parse_variant(variant, released=variants.HYP_VIT_SPACES, with_irt=True)
    config = recipes.hyp_vit(chosen)
    config.data.name = "inshop"
    config.train.batch_size = 900  # Paper: 450 of the 3,997 training classes in a batch.
    config.train.samples_per_class = 2  # Paper; a class has 6.5 images on average.
    # Paper; the released commands run 400 epochs of 8 batches.
    config.train.total_steps = 3_200 if chosen.suffix == "released" else 2_200
    config.eval.ks = (1, 10, 20, 30)  # Paper, as is usual for this dataset.
    if config.objective.name == "soft_triple":
        # As for SOP in Qian et al., ICCV 2019, whose classes are as small.
        config.objective.centres = 2
    if config.objective.name == "hypmix":
        config.objective.ball_weight = 8.0  # As for SOP; not published.
    config.run.checkpoint_every = 200
    recipes.specialise(config, chosen, _HIER, _IRT)
    return config
