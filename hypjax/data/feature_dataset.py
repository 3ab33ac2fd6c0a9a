"""Features of any model as a dataset, from a file: split by class as a user's own images are."""

import zlib

import numpy as np
from ml_collections import ConfigDict

from hypjax.data.dataset import hash_facts
from hypjax.data.parts import HeldOutClasses, Splits
from hypjax.data.photo_dataset import as_dataset, split_photos
from hypjax.data.photos import check_split, consistent, photos_of_features
from hypjax.errors import UserError
from hypjax.retrieval.embeddings import read_features


def open_features(path: str, labels: str | None, held_out: HeldOutClasses) -> Splits:
    """Opens the features of a file; holds out classes if they are not split already.

    Args:
        path: A file, see `hypjax.retrieval.feature_files`, or one that `hypjax.embed` wrote.
        labels: A file with the classes, if the first one has none.
        held_out: What is held out.

    Raises:
        UserError: A file cannot be read or is damaged, a class is unknown, or there are too few
            classes to train or to search.
    """
    table = read_features(path, labels)
    unknown = np.flatnonzero(table.labels == "")
    if len(unknown):
        raise UserError(
            f"{path} has {len(unknown)} rows without a class, such as row {unknown[0]}; give them "
            "as the array labels (of a table: the column label), or set --config.data.labels"
        )
    photos = consistent(photos_of_features(table), path)
    for photo in photos:
        check_split(path, photo.split)
    facts = ((*photo[1:4], zlib.crc32(np.ascontiguousarray(photo.vector))) for photo in photos)
    return split_photos(path, as_dataset(photos), hash_facts(facts), held_out)


def fit_to_features(config: ConfigDict) -> ConfigDict:
    """Returns the configuration with the sizes of the model that are None: those of the features.

    Other datasets than features leave it as it is.
    """
    model = config.model
    if config.data.name != "features" or None not in (model.width, model.head_dim):
        return config
    config = config.copy_and_resolve_references()
    dim = read_features(config.data.path, config.data.labels).features.shape[1]
    for field in ("width", "head_dim"):
        if config.model[field] is None:
            config.model[field] = dim
    return config
