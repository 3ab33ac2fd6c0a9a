"""Images to embed, with what is known of them: a user's own, or those of a prepared dataset."""

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from hypjax.config import default_config
from hypjax.config.choices import USERS
from hypjax.data.dataset import Dataset, joined
from hypjax.data.parts import Splits
from hypjax.data.photo_dataset import as_dataset, file_facts
from hypjax.data.photos import Photo, find_photos
from hypjax.data.splits import open_splits
from hypjax.errors import UserError


def images_of_photos(photos: Sequence[Photo]) -> Dataset:
    """A user's own images; they are not checked before they are embedded."""
    facts = [repr((*file_facts(photo), *photo[1:4])) for photo in photos]
    return dataclasses.replace(as_dataset(photos), facts=np.array(facts, object))


def images_of_splits(splits: Splits, *, scored: bool = False) -> Dataset:
    """All images of a prepared dataset, or those of its test alone.

    Of a judged one, whose images are of one class by name, the class is unknown.
    """
    test = {"test": splits.test}
    if splits.gallery is not None:
        test = {"query": splits.test, "gallery": splits.gallery}
    training = {} if scored else {"train": splits.train, "validation": splits.validation}
    parts = []
    for name, part in (training | test).items():
        if part is None:
            continue
        if splits.judgements is not None and part.num_classes == 1:
            part = dataclasses.replace(part, class_names=np.full(len(part), "", object))
        facts = [f"{splits.fingerprint} {name} {i}" for i in part.positions]
        facts, names = np.array(facts, object), np.full(len(part), name, object)
        parts.append(dataclasses.replace(part, facts=facts, splits=names))
    return functools.reduce(joined, parts)


def open_images(
    where: str | None, dataset: str | None = None, data_dir: str | None = None
) -> Dataset:
    """Opens a user's images, see `find_photos`, or all those of a prepared dataset."""
    if dataset is None:
        return images_of_photos(find_photos(where))
    return images_of_splits(open_prepared(dataset, data_dir))


def open_prepared(name: str, data_dir: str | None = None) -> Splits:
    """Opens a prepared dataset by its name alone, as published: no class is held out.

    Raises:
        UserError: It is unknown, is not prepared, or cannot be read.
    """
    if name in USERS:
        raise UserError(
            f"--dataset is {name}, which is not a prepared dataset; give your own files"
        )
    config = default_config()
    config.data.name, config.run.data_dir = name, data_dir
    return open_splits(config)
