"""CUB-200-2011: photos of birds (Wah et al., 2011)."""

import re
from collections.abc import Iterator

from hypjax.data.preparation.official import (
    Count,
    Entry,
    OfficialDataset,
    Row,
    damaged_list,
    match_row,
    read_rows,
)
from hypjax.data.preparation.sources import Archive, FileTree, Source

_CLASSES = 200  # The first half is for training.


def _list_images(tree: FileTree) -> Iterator[Entry]:
    """Lists images by class, which image_class_labels.txt must confirm, and by path."""
    labels = None
    if {"images.txt", "image_class_labels.txt"} <= tree.files:
        rows = read_rows(tree, "image_class_labels.txt")
        labels = dict(match_row(r"(\d+)\s+(\d+)", row, "1 1").groups() for row in rows)
    entries = []
    for row, image_id, path in _paths(tree):
        number = int(path[:3])
        if not 1 <= number <= _CLASSES:
            raise damaged_list(row.place, f"there is no class {number}")
        if labels is not None and labels.get(image_id) != str(number):
            found = f"class {labels[image_id]}" if image_id in labels else "no class"
            raise damaged_list(row.place, f"{path} has {found} in image_class_labels.txt")
        entries.append((number, path, row.place))
    for number, path, place in sorted(entries):
        split = "train" if number <= _CLASSES // 2 else "test"
        yield Entry(split, f"images/{path}", label=path.split("/")[0], place=place)


def _paths(tree: FileTree) -> Iterator[tuple[Row, str, str]]:
    """Yields row, number and path of each image in images.txt, or in the folders without it."""
    if "images.txt" in tree.files:
        for row in read_rows(tree, "images.txt"):
            match = match_row(r"(\d+)\s+(\d{3}\.[^/]+/[^/]+)", row, "1 001.Class/image.jpg")
            yield row, match[1], match[2]
        return
    for name in tree.files:
        if match := re.fullmatch(r"images/(\d{3}\.[^/]+/[^/]+\.jpe?g)", name, re.IGNORECASE):
            yield Row(str(tree.root / name), name), "", match[1]


DATASET = OfficialDataset(
    name="cub200",
    description="Caltech-UCSD Birds-200-2011, split by class: 1 to 100, 101 to 200.",
    counts={"train": Count(5864, 100), "test": Count(5924, 100)},
    source=Source(
        folders=("CUB_200_2011",),
        entries=("images.txt", "image_class_labels.txt", "images/[0-9][0-9][0-9].*"),
        archives=(
            Archive(
                "CUB_200_2011.tgz",
                unpacked="images/[0-9]*",
                # Address and checksum as in tensorflow_datasets.
                url="https://data.caltech.edu/records/65de6-vp158/files/CUB_200_2011.tgz?download=1",
                sha256="0c685df5597a8b24909f6a7c9db6d11e008733779a671760afef78feb49bf081",
            ),
        ),
        required="CUB_200_2011.tgz",
        origin="https://data.caltech.edu/records/65de6-vp158",
    ),
    list_images=_list_images,
)
