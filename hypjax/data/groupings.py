"""Groupings of images that a hierarchy should reproduce: classes, coarse classes, and more."""

import unicodedata
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from hypjax.catalogue import PREPARED, Prepared
from hypjax.data.dataset import Dataset

CLASS = "class"


class Grouping(NamedTuple):
    """A partition of images."""

    labels: Int[np.ndarray, " images"]  # Each image's group, from 0 without gaps.
    names: list[str]  # Of the groups.


def groupings(name: str, images: Dataset) -> dict[str, Grouping]:
    """Groups a dataset's images by class, and by coarse classes from the finest level on.

    Letters are also grouped by base letter, and birds by genus.
    """
    _, first, labels = np.unique(images.labels, return_index=True, return_inverse=True)
    names = images.class_names[first].tolist()
    partitions = {CLASS: Grouping(labels, names)}
    if images.coarse_labels is not None:
        groups, numbers = np.unique(images.coarse_labels, return_inverse=True)
        levels = PREPARED.get(name, Prepared("")).levels
        for depth in range(len(levels), 0, -1):
            paths = ["/".join(path.split("/", len(levels) - 1)[:depth]) for path in groups]
            paths, of_group = np.unique(paths, return_inverse=True)
            titles = [path.split("/", depth - 1)[-1] for path in paths]
            partitions[levels[depth - 1]] = Grouping(of_group[numbers], titles)
    for grouping, group_of in _BY_NAME.get(name, {}).items():
        groups, numbers = np.unique([*map(group_of, names)], return_inverse=True)
        partitions[grouping] = Grouping(numbers[labels], groups.tolist())
    return partitions


def base_letter(class_name: str) -> str:
    """The letter of a class of glyphs, without accents and in lower case: 'e' for 'É'."""
    return unicodedata.normalize("NFD", class_name[0])[0].casefold()


_BY_NAME: dict[str, dict[str, Callable[[str], str]]] = {
    "glyphs": {"base letter": base_letter},
    # 'Albatross' for '001.Black_footed_Albatross'.
    "cub200": {"genus": lambda species: species.rpartition(".")[2].rpartition("_")[2]},
}
