"""The prepared datasets by name.

To add a dataset, write a module that defines `DATASET`, add it to `OFFICIAL_DATASETS`, and add its
name to `hypjax/config/choices.py`.
"""

from hypjax.data.preparation import (
    cars196,
    cub200,
    grocery,
    inshop,
    omniglot,
    revisited,
    sfm120k,
    sop,
)
from hypjax.data.preparation.glyphs import Glyphs
from hypjax.data.preparation.official import OfficialDataset
from hypjax.data.preparation.scenes import Scenes
from hypjax.data.records import RecordBuilder

OFFICIAL_DATASETS: dict[str, OfficialDataset] = {
    dataset.name: dataset
    for dataset in (
        *(module.DATASET for module in (cub200, cars196, sop, inshop, omniglot, sfm120k)),
        *(grocery.PHOTOS, grocery.ICONS),
        *(revisited.ROXFORD, revisited.RPARIS, revisited.DISTRACTORS),
    )
}

# TFDS builders: `BUILDERS["cub200"](data_dir=...)`.
BUILDERS: dict[str, type[RecordBuilder]] = {
    Glyphs.name: Glyphs,
    Scenes.name: Scenes,
    **{name: dataset.builder for name, dataset in OFFICIAL_DATASETS.items()},
}
