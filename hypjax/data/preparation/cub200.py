"""CUB-200-2011: photos of birds (Wah et al., 2011).

Coarse classes are 38 families in 13 orders; the training half has 30 families in 13 orders. These
are as many as in the table of Chang et al. (CVPR 2021), which SupRank's code uses. That table puts
class 84, the Red-legged Kittiwake, into a separate family beside the kingfishers. Here it is a
gull, and class 83, the White-breasted Kingfisher, has a separate family (Halcyonidae).
"""

import re
from collections.abc import Iterator

from hypjax.data.preparation import official
from hypjax.data.preparation.official import Archive, Count, Entry, FileTree, OfficialDataset

_CLASSES = 200  # The first half is for training.


def _list_images(tree: FileTree) -> Iterator[Entry]:
    """Lists images by class, then by path; their folders are numbered like the classes."""
    families = official.read_coarse_labels("cub200")  # Keys are class numbers such as "001".
    for name in sorted(tree.files):
        if match := re.fullmatch(r"images/((\d{3})\.[^/]+)/[^/]+\.jpg", name):
            split = "train" if int(match[2]) <= _CLASSES // 2 else "test"
            yield Entry(split, name, match[1], families.get(match[2], ""))


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
