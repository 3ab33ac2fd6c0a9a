"""Omniglot: retrieval of handwritten characters from unseen alphabets.

Variants: `hyp` (Poincaré ball), `sph` (sphere), `mix` (HypMix, with its settings for CUB), `moco`
(MoCo's loss, in the ball), `hier` (HIER on top of Proxy-Anchor), `happier` (HAPPIER, of alphabets),
`irt-l` and `irt-r` (the losses of IRT); `pa`, `ms`, `supcon` and the other names in
`hypjax.config.variants.LOSSES` train other losses on the sphere. The papers that hypjax reproduces
do not use this dataset, and the recipe, from `configs/glyphs.py`, was not tuned for it.
"""

from ml_collections import ConfigDict

from hypjax.config import recipes

VARIANTS = recipes.LETTER_VARIANTS


def get_config(variant: str = "hyp") -> ConfigDict:
    """Returns the configuration of a variant."""
    config = recipes.letters(variant)
    config.data.name = "omniglot"
    config.data.mean, config.data.std = (0.92,), (0.24,)  # Measured on the training images.
    config.data.validation_classes = 0.1
    config.train.batch_size = 200
    config.eval.ks = (1, 5, 10, 19)  # A character has 20 drawings.
    return config
