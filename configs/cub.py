"""CUB-200-2011: retrieval of unseen bird species, with Hyp-ViT and Sph-ViT.

Variants: `hyp` (Poincaré ball) or `sph` (sphere), followed by `-vit`, `-deit` or `-dino` for the
pretrained weights; the default is `hyp-dino`. The suffix `,released` trains for as many steps as
the released commands, as in `configs/cub.py:sph-vit,released`.

`mix` (HypMix, Yue et al., WACV 2024) in place of `hyp` or `sph` trains in both spaces, with λ = 3.

`moco` trains with MoCo's loss in the ball. `hyp-resnet50,hyp-vit` and `sph-resnet50,hyp-vit` train
ResNet-50 by Hyp-ViT's recipe. The suffix `,unlabelled`, after `hyp`, `sph` or `moco` with an
encoder, trains without labels on two views of each image, as in Hyp-ViT's supplement.

`hier` in place of `hyp` trains with HIER (Kim et al., CVPR 2023) on top of Proxy-Anchor, and `pa`
with Proxy-Anchor only, both by the recipe of HIER, as are these two, `hyp` and `sph` with
`-resnet50`.
`lhier` is an experiment in the direction of LHIER+ (Bdeir and Landwehr, 2024): HIER on the
hyperboloid, with a learned curvature, and proxies that are trained by Riemannian Adam.

Every loss also exists with recent encoders: `-dinov2`, `-dinov3`, `-siglip2`, `-clip`, and
`-lite`, the small EfficientNet-Lite0, as in `configs/cub.py:hyp-dinov2`. With these encoders there
are also IRT's losses `irt-l` and `irt-r`. `hyp+hier` is HIER on top of Hyp-ViT's loss. These
combinations are untried.

The suffix `,frozen` trains only a head, on features that the encoder computes once. This takes
minutes on a CPU for `configs/cub.py:hyp-lite,frozen`. With `-lite` and `-dinov2`, the suffix
`,last` also trains the encoder's last blocks.

`irt-o`, `irt-l` and `irt-r` follow the recipe of IRT (El-Nouby et al., 2021). `irt-o` is the
pretrained DeiT, which is only evaluated (`--mode=evaluate`); `irt-l` trains DeiT with the
contrastive loss and a memory; `irt-r` adds differential entropy. The suffix `-distilled` chooses
the distilled DeiT, and `-resnet50` ResNet-50.

The other names in `hypjax.config.variants.LOSSES` train another loss on the sphere, otherwise by
the recipe of Hyp-ViT, as in `configs/cub.py:ms-dino`. No paper reports these combinations.
"""

from ml_collections import ConfigDict

from hypjax.config import hier, irt, recipes, variants

_HIER = hier.Schedule(
    epoch=32,
    epochs=100,
    frozen=1,
    weight_decay=1e-2,
    head_rate=1.0,
    resnet_rate=1e-4,
    resnet_decay=(0.5, 5),
)
_IRT = irt.Schedule(2_000, "shuffled")


def get_config(variant: str = "hyp-dino") -> ConfigDict:
    """Returns the configuration of a variant."""
    chosen = variants.parse_variant(
        variant, released=(*variants.HYP_VIT_SPACES, "mix"), with_irt=True
    )
    config = recipes.hyp_vit(chosen)
    config.data.name = "cub200"
    config.data.resize = 256  # Paper; 224 for the other datasets.
    config.train.batch_size = 900  # Paper: all 100 training classes in every batch.
    config.train.samples_per_class = 9  # The released command; the paper names no number.
    # Paper; the released commands run 50 epochs of one batch.
    config.train.total_steps = 50 if chosen.suffix == "released" else 200
    config.eval.ks = (1, 2, 4, 8)  # Paper, as is usual for this dataset.
    config.run.checkpoint_every = 50
    recipes.specialise(config, chosen, _HIER, _IRT)
    return config
