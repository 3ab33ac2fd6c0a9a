"""Stanford Online Products: retrieval of unseen products, with Hyp-ViT and Sph-ViT.

Variants are the same as in `configs/cub.py`; the default is `hyp-dino`. In `mix`, λ = 8. `happier`,
short for `happier-resnet50`, follows the released code of HAPPIER (Ramzi et al., ECCV 2022), whose
results it does not reproduce. With other encoders, such as `happier-dino`, only the loss and the
batches follow that code.
"""

from ml_collections import ConfigDict

from hypjax.config import hier, irt, recipes, variants

_HIER = hier.Schedule(
    epoch=330,
    epochs=150,
    frozen=5,
    weight_decay=1e-4,
    head_rate=100.0,
    resnet_rate=6e-4,
    resnet_decay=(0.3, 25),
)
_IRT = irt.Schedule(35_000, "drawn_classes")
_EPOCH = 5 * 66  # HAPPIER's steps per epoch: five batches for each pair of 12 super-classes.


def get_config(variant: str = "hyp-dino") -> ConfigDict:
    """Returns the configuration of a variant."""
    chosen = variants.parse_variant(
        variant,
        short={"happier": "happier-resnet50"},
        released=variants.HYP_VIT_SPACES,
        with_irt=True,
        losses=("happier",),
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
    recipes.specialise(config, chosen, _HIER, _IRT)
    if chosen.loss == "happier":
        config.train.sampling = "coarse_pairs"
        config.train.batch_size, config.train.samples_per_class = 256, 4
        if chosen.name == "happier-resnet50":
            _follow_happier(config)
    return config


def _follow_happier(config: ConfigDict) -> None:
    """Changes Hyp-ViT's recipe to the recipe of HAPPIER's released code, where fields allow it.

    Differences: the code squashes test images to 256 × 256 pixels and crops them; its learning rate
    starts to fall after the warm-up, and its proxies' learning rate ends at 0.1; and its head has
    PyTorch's default initialisation.
    """
    optim = config.optim
    config.data.update(resize=256, crop_area=(0.16, 1.0))
    config.model.update(head="norm_dense", head_dim=512, pooling="avg", eval_pooling="avg")
    optim.update(name="adam", learning_rate=5e-5, weight_decay=1e-4)
    optim.update(schedule="cosine", clip_norm=None)
    optim.groups = (("head", 2.0, None, 0),)
    config.objective.proxy_rate = 10 / optim.learning_rate
    config.train.update(head_warmup_steps=5 * _EPOCH, total_steps=100 * _EPOCH)
