"""CUB-200-2011: photos of birds (Wah et al., 2011)."""

import re
from collections.abc import Iterator

from hypjax.data.preparation.official import Archive, Count, Entry, FileTree, OfficialDataset

_CLASSES = 200  # The first half is for training.


def _list_images(tree: FileTree) -> Iterator[Entry]:
    """Lists images by class and by path; their folders are numbered like the classes."""
    for name in sorted(tree.files):
        if match := re.fullmatch(r"images/((\d{3})\.[^/]+)/[^/]+\.jpg", name):
            split = "train" if int(match[2]) <= _CLASSES // 2 else "test"
            yield Entry(split, name, label=match[1])


DATASET = OfficialDataset(
    name="cub200",
    counts={"train": Count(5864, 100), "test": Count(5924, 100)},
    folders=("CUB_200_2011",),
    entries=("images/[0-9][0-9][0-9].*",),
    archives=(
        Archive(
            "CUB_200_2011.tgz",
            unpacked="images/[0-9]*",
            # Address and checksum as in tensorflow_datasets.
            url="https://data.caltech.edu/records/65de6-vp158/files/CUB_200_2011.tgz?download=1",
            sha256="0c685df5597a8b24909f6a7c9db6d11e008733779a671760afef78feb49bf081",
        ),
    ),
    source="CUB_200_2011.tgz from https://data.caltech.edu/records/65de6-vp158",
    list_images=_list_images,
)
