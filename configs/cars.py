"""Cars-196: retrieval of unseen car models, with Hyp-ViT and Sph-ViT.

Variants are the same as in `configs/cub.py`, except IRT's; the default is `hyp-dino`. In `mix`,
λ = 8. `hyp-dino-patch8` uses patches of 8×8 pixels (Table 4 of Hyp-ViT). `hyp-lite`, `sph-lite` and
`mix-lite` fine-tune EfficientNet-Lite0 at 128 pixels for 240 steps, on a CPU; no paper reports it.
"""

from ml_collections import ConfigDict

from hypjax.config import hier, recipes, variants

_HIER = hier.Schedule(
    epoch=44,
    epochs=100,
    frozen=1,
    weight_decay=1e-2,
    head_rate=1.0,
    resnet_rate=1e-4,
    resnet_decay=(0.5, 10),
)


def get_config(variant: str = "hyp-dino") -> ConfigDict:
    """Returns the configuration of a variant."""
    chosen = variants.parse_variant(variant, released=variants.HYP_VIT_SPACES)
    config = recipes.hyp_vit(chosen)
    config.data.name = "cars196"
    # The paper's batch of 900 at the released command's 9 images of a class would need 100 classes,
    # but there are 98.
    config.train.batch_size = 882
    config.train.samples_per_class = 9
    if chosen.encoder == "dino-patch8":
        config.train.batch_size = 120  # Paper.
        config.train.samples_per_class = 2  # Released command; the paper names no number.
    # Paper; the released commands run 300 epochs of one batch. Assumed for 8×8 patches too.
    config.train.total_steps = 300 if chosen.suffix == "released" else 600
    config.eval.ks = (1, 2, 4, 8)  # Paper, as is usual for this dataset.
    if config.objective.name == "hypmix":
        config.objective.ball_weight = 8.0  # Yue et al., WACV 2024.
    config.run.checkpoint_every = 100
    recipes.specialise(config, chosen, _HIER)
    if recipes.is_brief(chosen):
        recipes.fine_tune_briefly(config)
        # Crops of a fifth of the image, as in papers, hide what tells cars apart: measured, as the
        # number of steps, on cars cut to their boxes (docs/results/fine-tuning.md).
        config.data.crop_area = (0.6, 1.0)
        config.train.total_steps = 240
        if chosen.loss != "mix":
            config.objective.temperature = 0.2
    return config
