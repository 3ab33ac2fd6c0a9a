"""Groups images by classes, coarse classes and others that a hierarchy should reproduce."""

import unicodedata
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from hypjax.catalogue import PREPARED, Prepared
from hypjax.data.dataset import Dataset
from hypjax.types import coarse_levels

CLASS = "class"


class Grouping(NamedTuple):
    """A partition of images into groups."""

    labels: Int[np.ndarray, " images"]  # Each image's group, from 0 without gaps.
    names: list[str]  # Names of the groups.


def groupings(dataset_name: str, images: Dataset) -> dict[str, Grouping]:
    """Groups a dataset's images by class, coarse classes (finest first) and `_BY_CLASS_NAME`."""
    _, first_rows, labels = np.unique(images.labels, return_index=True, return_inverse=True)
    class_names = images.class_names[first_rows].tolist()
    partitions = {CLASS: Grouping(labels, class_names)}
    if images.coarse_labels is not None:
        level_names = PREPARED.get(dataset_name, Prepared("")).levels
        depths = range(len(level_names), 0, -1)
        # Users' datasets have one named level: their finest groups are named by whole paths.
        for depth, paths in zip(depths, coarse_levels(images.coarse_labels), strict=False):
            group_paths, groups = np.unique(paths, return_inverse=True)
            group_names = [path.split("/", depth - 1)[-1] for path in group_paths]
            partitions[level_names[depth - 1]] = Grouping(groups, group_names)
    for grouping_name, group_name_of in _BY_CLASS_NAME.get(dataset_name, {}).items():
        names_by_class = [group_name_of(class_name) for class_name in class_names]
        names, group_by_class = np.unique(names_by_class, return_inverse=True)
        partitions[grouping_name] = Grouping(group_by_class[labels], names.tolist())
    return partitions


def base_letter(class_name: str) -> str:
    """Returns the letter of a class of glyphs without accents, in lower case: 'e' for 'É'."""
    return unicodedata.normalize("NFD", class_name[0])[0].casefold()


# By dataset and grouping: the function from a class's name to its group's name.
_BY_CLASS_NAME: dict[str, dict[str, Callable[[str], str]]] = {
    "glyphs": {"base letter": base_letter},
    # 'Albatross' for '001.Black_footed_Albatross'.
    "cub200": {"genus": lambda species: species.rpartition(".")[2].rpartition("_")[2]},
}
