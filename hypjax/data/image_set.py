"""Images to embed, with what is known of them: a user's own, or those of a prepared dataset."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
from jaxtyping import Shaped

from hypjax.config import default_config
from hypjax.config.choices import USERS
from hypjax.data.dataset import Dataset, joined
from hypjax.data.parts import Splits
from hypjax.data.photo_dataset import as_dataset, file_facts, hash_facts
from hypjax.data.photos import Photo, find_photos
from hypjax.data.splits import open_splits
from hypjax.errors import UserError


@dataclasses.dataclass(frozen=True, eq=False)
class ImageSet:
    """Images in a fixed order.

    Attributes:
        dataset: The images, and the names of their classes.
        facts: Of each image, simple values that differ if its pixels do, its class, its group or
            its split.
        splits: Names of their splits, [n] strings, '' for an image in none; None if all are.
    """

    dataset: Dataset
    facts: Sequence[tuple[Any, ...]]
    splits: Shaped[np.ndarray, " n"] | None = None

    @classmethod
    def of_photos(cls, photos: Sequence[Photo]) -> Self:
        """A user's own images; they are not checked before they are embedded."""
        facts = [
            (*file_facts(photo), photo.label, *(x for x in photo[2:4] if x is not None))
            for photo in photos
        ]
        splits = None
        if any(photo.split is not None for photo in photos):
            splits = np.array([photo.split or "" for photo in photos])
        return cls(as_dataset(photos), facts, splits)

    @classmethod
    def of_splits(cls, splits: Splits, *, scored: bool = False) -> Self:
        """All images of a prepared dataset, or those of its test alone.

        Of a judged one, whose images are of one class by name, the class is unknown.
        """
        test = {"test": splits.test}
        if splits.gallery is not None:
            test = {"query": splits.test, "gallery": splits.gallery}
        training = {} if scored else {"train": splits.train, "validation": splits.validation}
        parts = {name: part for name, part in (training | test).items() if part is not None}
        if splits.judgements is not None:
            parts = {name: _without_single_class(part) for name, part in parts.items()}
        places = [(name, i) for name, part in parts.items() for i in part.positions.tolist()]
        return cls(
            functools.reduce(joined, parts.values()),
            [(splits.fingerprint, *place) for place in places],
            np.array([name for name, _ in places]),
        )

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, rows: slice) -> Self:
        """Some of the images."""
        return dataclasses.replace(
            self,
            dataset=self.dataset.take(np.arange(len(self))[rows]),
            facts=self.facts[rows],
            splits=None if self.splits is None else self.splits[rows],
        )

    @functools.cached_property
    def fingerprint(self) -> str:
        """Hash of what is known of the images, of their classes and of their order."""
        return hash_facts(self.facts)

    @property
    def ids(self) -> Shaped[np.ndarray, " n"]:
        """Their paths, or their names in the dataset, [n] strings."""
        return np.array([self.dataset.name(i) for i in range(len(self))], dtype=str)

    @property
    def labels(self) -> Shaped[np.ndarray, " n"]:
        """Names of their classes, [n] strings; '' if unknown."""
        return np.array([self.dataset.class_name(i) for i in range(len(self))], dtype=str)

    @property
    def superlabels(self) -> Shaped[np.ndarray, " n"] | None:
        """Names of the groups of their classes, [n] strings, if there are any."""
        groups = self.dataset.superlabels
        return None if groups is None else np.asarray(self.dataset.group_names, dtype=str)[groups]


def _without_single_class(part: Dataset) -> Dataset:
    if part.num_classes > 1:
        return part
    return dataclasses.replace(part, class_names=[""] * len(part.records))


def open_images(
    where: str | None, dataset: str | None = None, data_dir: str | None = None
) -> ImageSet:
    """Opens a user's images, see `find_photos`, or all those of a prepared dataset."""
    if dataset is None:
        return ImageSet.of_photos(find_photos(where))
    return ImageSet.of_splits(open_prepared(dataset, data_dir))


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
