"""Grocery Store Dataset: photos of groceries, taken with a phone (Klasson et al., WACV 2019).

The three published parts are pooled, and split by coarse class instead: the first half of each
department's coarse classes, rounded up, in the order of `classes.csv`, is for training. No paper
reports this split.
"""

import csv
import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import pyarrow

from hypjax.data.preparation.official import Archive, Count, Entry, FileTree, OfficialDataset
from hypjax.data.records import CAPTIONS, CAPTIONS_SCHEMA


class _Product(NamedTuple):
    """A row of `classes.csv`, in which products are numbered in order."""

    name: str
    coarse: str
    department: str
    icon: str  # Path of the product's iconic picture.
    description: str  # Path of its description.

    def entry(self, split: str, name: str) -> Entry:
        return Entry(split, name, self.name, f"{self.department}/{self.coarse}")


def _list_photos(tree: FileTree, test_split: str) -> Iterator[Entry]:
    """Lists photos by product, then in published order; `test_split` is 'test' or 'query'."""
    products = _read_products(tree)
    training_coarse_classes = _training_coarse_classes(products)
    entries: list[list[Entry]] = [[] for _ in products]
    for part in ("train", "val", "test"):
        for match in tree.rows(f"{part}.txt", rf"({part}/.+), (\d+), \d+"):
            name, number = match[1], int(match[2])
            if number >= len(products):
                raise tree.damaged(f"{part}.txt", f"there is no product {number}")
            product = products[number]
            split = "train" if product.coarse in training_coarse_classes else test_split
            entries[number].append(product.entry(split, name))
    return itertools.chain.from_iterable(entries)


def _list_icons(tree: FileTree) -> Iterator[Entry]:
    """Lists photos for training and as queries, and each product's icon as gallery."""
    yield from _list_photos(tree, test_split="query")
    yield from (product.entry("gallery", product.icon) for product in _read_products(tree))


def _training_coarse_classes(products: list[_Product]) -> set[str]:
    """Returns 10 of 19 coarse classes of fruit, 5 of 9 of packages and 8 of 15 of vegetables."""
    departments: dict[str, dict[str, None]] = {}  # Coarse classes in order of first appearance.
    for product in products:
        departments.setdefault(product.department, {})[product.coarse] = None
    return {x for names in departments.values() for x in [*names][: math.ceil(len(names) / 2)]}


def _read_products(tree: FileTree) -> list[_Product]:
    """Reads `classes.csv`: product, its number, coarse class, its number, icon, description."""
    products: list[_Product] = []
    for match in tree.rows("classes.csv", ".+", skip=1):
        fields = next(csv.reader([match[0]]))
        if len(fields) != 6 or fields[1] != str(len(products)) or fields[4].count("/") < 2:
            raise tree.damaged("classes.csv", f"{match[0][:100]!r} is unexpected")
        icon = fields[4].removeprefix("/")
        _, department, *_ = icon.split("/")
        products.append(_Product(fields[0], fields[2], department, icon, fields[5].lstrip("/")))
    return products


def _read_descriptions(tree: FileTree) -> pyarrow.Table:
    """Reads the description of each product that has one."""
    described = [product for product in _read_products(tree) if product.description in tree.files]
    texts = [tree.read_list(x.description).decode("utf-8-sig", "replace") for x in described]
    columns = [x.name for x in described], [" ".join(text.split()) for text in texts]
    return pyarrow.table([*columns], schema=CAPTIONS_SCHEMA)


_HOME = "https://github.com/marcusklasson/GroceryStoreDataset"
_ARCHIVE = "GroceryStoreDataset-master.zip"
PHOTOS = OfficialDataset(
    name="grocery",
    counts={"train": Count(3098, 45), "test": Count(2323, 36)},
    folders=("GroceryStoreDataset-master/dataset", "GroceryStoreDataset/dataset", "dataset"),
    entries=(
        *("classes.csv", "train.txt", "val.txt", "test.txt", "train", "val", "test"),
        "iconic-images-and-descriptions",
    ),
    archives=(Archive(_ARCHIVE, "train/*", url=f"{_HOME}/archive/refs/heads/master.zip"),),
    source=f"{_ARCHIVE} from {_HOME}",
    list_images=lambda tree: _list_photos(tree, test_split="test"),
    tables={CAPTIONS: _read_descriptions},
    downloads="grocery",
)
ICONS = PHOTOS._replace(
    name="grocery_icons",
    counts={"train": Count(3098, 45), "query": Count(2323, 36), "gallery": Count(81, 81)},
    list_images=_list_icons,
)
