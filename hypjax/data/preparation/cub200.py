"""CUB-200-2011: photos of birds (Wah et al., 2011).

Coarse classes are 38 families in 13 orders, of which the training half has 30 and 13: as many as in
the table of Chang et al. (CVPR 2021), which SupRank's code uses. That table puts class 84, the
Red-legged Kittiwake, into a family of its own beside the kingfishers. Here it is a gull, and class
83, the White-breasted Kingfisher, has a family of its own (Halcyonidae).
"""

import re
from collections.abc import Iterator

from hypjax.data.preparation.official import Archive, Count, Entry, FileTree, OfficialDataset

_CLASSES = 200  # The first half is for training.
# Orders, families, and the numbers of their classes.
_FAMILIES = """
Anseriformes/Anatidae 46 87 89-90
Apodiformes/Trochilidae 67-70
Caprimulgiformes/Caprimulgidae 22 92 105
Charadriiformes/Alcidae 5-8 58 106
Charadriiformes/Laridae 59-66 84 141-147
Charadriiformes/Stercorariidae 71-72
Coraciiformes/Cerylidae 79-82
Coraciiformes/Halcyonidae 83
Cuculiformes/Cuculidae 4 31-33 110
Gaviiformes/Gaviidae 86
Passeriformes/Alaudidae 85
Passeriformes/Bombycillidae 185-186
Passeriformes/Cardinalidae 14-17 54 57 139-140
Passeriformes/Certhiidae 28
Passeriformes/Corvidae 29-30 73-75 93 107-108
Passeriformes/Fringillidae 34-35 47-48 55-56
Passeriformes/Hirundinidae 135-138
Passeriformes/Icteridae 9-13 26-27 49 88 95-98
Passeriformes/Icteriidae 20
Passeriformes/Laniidae 111-112
Passeriformes/Mimidae 19 91 149-150
Passeriformes/Motacillidae 104
Passeriformes/Parulidae 99 109 158-184 200
Passeriformes/Passerellidae 21 76 113-117 119-133 148
Passeriformes/Passeridae 118
Passeriformes/Ptilonorhynchidae 18
Passeriformes/Sittidae 94
Passeriformes/Sturnidae 134
Passeriformes/Troglodytidae 193-199
Passeriformes/Tyrannidae 37-43 77-78 102-103
Passeriformes/Vireonidae 151-157
Pelecaniformes/Pelecanidae 100-101
Piciformes/Picidae 36 187-192
Podicipediformes/Podicipedidae 50-53
Procellariiformes/Diomedeidae 1-3
Procellariiformes/Procellariidae 45
Suliformes/Fregatidae 44
Suliformes/Phalacrocoracidae 23-25
"""


def families() -> dict[int, str]:
    """The order and family of each class, such as 'Passeriformes/Corvidae'."""
    family_of = {}
    for family, *numbers in map(str.split, _FAMILIES.strip().splitlines()):
        for first, _, last in (number.partition("-") for number in numbers):
            family_of |= dict.fromkeys(range(int(first), int(last or first) + 1), family)
    return family_of


def _list_images(tree: FileTree) -> Iterator[Entry]:
    """Lists images by class and by path; their folders are numbered like the classes."""
    family_of = families()
    for name in sorted(tree.files):
        if match := re.fullmatch(r"images/((\d{3})\.[^/]+)/[^/]+\.jpg", name):
            number = int(match[2])
            split = "train" if number <= _CLASSES // 2 else "test"
            yield Entry(split, name, match[1], family_of.get(number, ""))


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
