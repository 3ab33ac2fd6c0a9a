"""Cars-196: retrieval of unseen car models, with Hyp-ViT and Sph-ViT.

Variants: `hyp` (Poincaré ball) or `sph` (sphere), followed by `-vit`, `-deit` or `-dino` for the
pretrained weights; the default is `hyp-dino`. `hyp-dino-patch8` uses patches of 8×8 pixels (Table 4
of the paper). The suffix `,released` trains for as many steps as the released commands, as in
`configs/cars.py:sph-vit,released`.

`mix` (HypMix, Yue et al., WACV 2024) in place of `hyp` or `sph` trains in both spaces, with λ = 8.

`moco` trains with MoCo's loss in the ball. `hyp-resnet50,hyp-vit` follows Hyp-ViT's recipe, and
`,unlabelled` after `hyp`, `sph` or `moco` with an encoder trains without labels, on two views of
each image, as in its supplement.

`hier` in their place trains with HIER (Kim et al., CVPR 2023) on top of Proxy-Anchor, and `pa` with
Proxy-Anchor alone, both by the recipe of HIER. These two and `hyp` also exist with `-resnet50`.

Every loss also exists with encoders of today: `-dinov2`, `-dinov3`, `-siglip2`, `-clip`, and
`-lite`, the small EfficientNet-Lite0, as in `configs/cars.py:hyp-dinov2`. So do `hyp+hier`, HIER on
top of Hyp-ViT's loss, and IRT's losses `irt-l` and `irt-r`. These are untried.

The suffix `,frozen` trains a head alone, on features that the encoder computes once: minutes on a
CPU for `configs/cars.py:hyp-lite,frozen`. With `-lite` and `-dinov2`, `,last` trains the
encoder's last blocks, too.

The other names in `hypjax.config.variants.LOSSES` train another loss on the sphere, otherwise by
the recipe of Hyp-ViT, as in `configs/cars.py:ms-dino`. No paper reports these combinations.
"""

from ml_collections import ConfigDict

from hypjax.config import hier, recipes, variants

_HIER = hier.Schedule(44, 100, 1, 1e-2, 1.0, 1e-4, (0.5, 10))


def get_config(variant: str = "hyp-dino") -> ConfigDict:
    """Returns the configuration of a variant."""
    chosen = variants.parse_variant(variant, released=True)
    config = recipes.hyp_vit(chosen)
    config.data.name = "cars196"
    # Paper: 9 images per class. Its batch of 900 would need 100 classes, but there are 98.
    config.train.batch_size = 882
    config.train.samples_per_class = 9
    if chosen.encoder == "dino-patch8":
        config.train.batch_size = 120  # Paper.
        config.train.samples_per_class = 2  # The paper does not say; 120 is not a multiple of 9.
    # Paper; the released commands run 300 epochs of one batch. Assumed for 8×8 patches too.
    config.train.total_steps = 300 if chosen.suffix == "released" else 600
    config.eval.ks = (1, 2, 4, 8)  # Paper, as is usual for this dataset.
    if config.objective.name == "hypmix":
        config.objective.ball_weight = 8.0  # Yue et al., WACV 2024.
    config.run.checkpoint_every = 100
    recipes.specialise(config, chosen, _HIER)
    return config
