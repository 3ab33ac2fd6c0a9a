"""A head on features that any model computed, from a file.

    python -m hypjax.main --config=configs/features.py --config.data.path=features.npz

An .npz file has the arrays `features` [n, d] and `labels` [n], and optionally `splits`,
`coarse_labels` and `ids`; docs/features.md describes other formats. Without splits, a quarter of
the classes is held out for the test, and a tenth of the rest for validation.

Variants name the loss: `hyp` (the default), `sph`, `mix`, `hier`, or one of
`hypjax.config.variants.LOSSES`.
"""

from ml_collections import ConfigDict

from hypjax.config import recipes, variant_error, variants

VARIANTS = (*variants.HYP_VIT_SPACES, "mix", "hier", *variants.LOSSES)


def get_config(variant: str | None = None) -> ConfigDict:
    """Returns the configuration of a variant."""
    variant = variant or "hyp"
    if variant not in VARIANTS:
        raise variant_error(variant, VARIANTS)
    config = recipes.hyp_vit(variants.Variant(variant, variant, "lite"))  # Encoder: set below.
    config.variant = variant
    recipes.train_head(config)
    config.data.name = "features"
    config.data.test_classes = 0.25
    config.data.validation_classes = 0.1
    config.model.architecture, config.model.weights = "features", None
    config.model.width = config.model.head_dim = None  # The features' dimension.
    config.eval.every = 50
    config.run.eval_batch_size = 4096
    return config
