"""Glyphs: retrieval of unseen letters, drawn from matplotlib's fonts.

This is the default example: it needs no download and no accelerator. Variants: `hyp` (Poincaré
ball), `sph` (sphere), `mix` (HypMix, with its settings for CUB), `moco` (MoCo's loss, in the ball),
`hier` (HIER on top of Proxy-Anchor), `happier` (HAPPIER, of scripts), `irt-l` and `irt-r` (the
losses of IRT); `pa`, `ms`, `supcon` and the other names in `hypjax.config.variants.LOSSES` train
other losses on the sphere. The recipe is `hypjax.config.recipes.letters`, whose learning rate,
schedule, batch, crops and image scale were chosen on the validation classes.
"""

from ml_collections import ConfigDict

from hypjax.config import recipes

VARIANTS = recipes.LETTER_VARIANTS


def get_config(variant: str = "hyp") -> ConfigDict:
    """Returns the configuration of a variant."""
    config = recipes.letters(variant)
    config.data.name = "glyphs"
    config.data.mean, config.data.std = (0.085,), (0.24,)  # Measured on the training images.
    config.data.validation_classes = 100
    config.train.batch_size = 256
    return config
