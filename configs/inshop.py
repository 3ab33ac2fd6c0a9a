"""In-Shop (DeepFashion): retrieval of unseen clothes, with Hyp-ViT and Sph-ViT.

Variants: `hyp` (Poincaré ball) or `sph` (sphere), followed by `-vit`, `-deit` or `-dino` for the
pretrained weights; the default is `hyp-dino`. The suffix `,released` trains for as many steps as
the released commands, as in `configs/inshop.py:sph-vit,released`.

The paper's ablations (Table 5) each change one field of `hyp-vit`, at the same number of steps:

    launch/sweep.sh configs/inshop.py:hyp-vit objective.c 0.01 0.05 0.1 0.3 0.5 1.0
    launch/sweep.sh configs/inshop.py:hyp-vit model.head_dim 16 32 64 128
    launch/sweep.sh configs/inshop.py:hyp-vit train.batch_size 200 400 900 1600

`mix` (HypMix, Yue et al., WACV 2024) in place of `hyp` or `sph` trains in both spaces, with λ = 8,
which is our choice.

`moco` trains with MoCo's loss in the ball. `hyp-resnet50,hyp-vit` follows Hyp-ViT's recipe, and
`,unlabelled` after `hyp`, `sph` or `moco` with an encoder trains without labels, on two views of
each image, as in its supplement.

`hier` in their place trains with HIER (Kim et al., CVPR 2023) on top of Proxy-Anchor, and `pa` with
Proxy-Anchor alone, both by the recipe of HIER. These two and `hyp` also exist with `-resnet50`.

Every loss also exists with encoders of today: `-dinov2`, `-dinov3`, `-siglip2`, `-clip`, and
`-lite`, the small EfficientNet-Lite0, as in `configs/inshop.py:hyp-dinov2`. So do `hyp+hier`, HIER
on top of Hyp-ViT's loss, and IRT's losses `irt-l` and `irt-r`. These are untried.

The suffix `,frozen` trains a head alone, on features that the encoder computes once: minutes on a
CPU for `configs/inshop.py:hyp-lite,frozen`. With `-lite` and `-dinov2`, `,last` trains the
encoder's last blocks, too.

`irt-o`, `irt-l` and `irt-r` follow the recipe of IRT (El-Nouby et al., 2021): the pretrained DeiT,
which is only evaluated, by `--mode=evaluate`; DeiT trained by the contrastive loss with a memory;
and with differential entropy besides. `-distilled` at their end is the distilled DeiT, `-resnet50`
ResNet-50.

The other names in `hypjax.config.variants.LOSSES` train another loss on the sphere, otherwise by
the recipe of Hyp-ViT, as in `configs/inshop.py:ms-dino`. No paper reports these combinations.
"""

from ml_collections import ConfigDict

from hypjax.config import hier, irt, recipes, variants

_HIER = hier.Schedule(143, 150, 5, 1e-4, 100.0, 6e-4, (0.3, 20))
_IRT = irt.Schedule(35_000, "drawn_classes", memory=0.2, memory_decay=0.999)


def get_config(variant: str = "hyp-dino") -> ConfigDict:
    """Returns the configuration of a variant."""
    chosen = variants.parse_variant(variant, released=True, with_irt=True)
    config = recipes.hyp_vit(chosen)
    config.data.name = "inshop"
    config.train.batch_size = 900  # Paper: 450 of the 3,997 training classes in a batch.
    config.train.samples_per_class = 2  # Paper; a class has 6.5 images on average.
    # Paper; the released commands run 400 epochs of 8 batches.
    config.train.total_steps = 3_200 if chosen.suffix == "released" else 2_200
    config.eval.ks = (1, 10, 20, 30)  # Paper, as is usual for this dataset.
    if config.objective.name == "soft_triple":
        # As for SOP in Qian et al., ICCV 2019: classes are as small.
        config.objective.centres = 2
    if config.objective.name == "hypmix":
        config.objective.ball_weight = 8.0  # As for SOP; not published.
    config.run.checkpoint_every = 200
    recipes.specialise(config, chosen, _HIER, _IRT)
    return config
