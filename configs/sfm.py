"""Particular objects: trained on SfM-120k, scored on Revisited Oxford and Paris.

Variants: `irt-o`, `irt-l` or `irt-r` (El-Nouby et al., 2021) followed by `-deit-s`, `-deit-b` or
`-deit-b-384`; the default is `irt-r-deit-s`. `irt-o` is the pretrained encoder, which is only
evaluated, by `--mode=evaluate`; `irt-l` trains it on tuples with the contrastive loss, and `irt-r`
with differential entropy besides. `hyp` in their place is `irt-r` in the Poincaré ball, which no
paper reports.

128 dimensions, as in the paper's Table 7: `--config.eval.pca.encoder=128`, which is fitted on
SfM-120k; for `irt-o` also set `--config.data.name=sfm120k` and
`--config.eval.benchmarks="('roxford5k','rparis6k')"`.
"""

from ml_collections import ConfigDict

from hypjax.config import irt_objects


def get_config(variant: str = "irt-r-deit-s") -> ConfigDict:
    """Returns the configuration of a variant."""
    return irt_objects.recipe(variant)
