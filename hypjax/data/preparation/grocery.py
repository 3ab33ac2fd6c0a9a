"""Grocery Store Dataset: photos of groceries, taken with a phone (Klasson et al., WACV 2019).

Its three published parts, made to classify, are pooled and split by class instead, so that the test
shows other kinds of goods than training did: of each department's coarse classes, in the order of
`classes.csv`, the first half, rounded up, is for training. No paper reports this split.
"""

import csv
import pathlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

from hypjax.data.preparation.official import (
    Count,
    Entry,
    OfficialDataset,
    damaged_list,
    match_row,
    read_rows,
)
from hypjax.data.preparation.sources import Archive, FileTree, Source

# Coarse classes for training, by department: 10 of 19, 5 of 9 and 8 of 15.
TRAINED = {
    "Fruit": (
        *("Apple", "Avocado", "Banana", "Kiwi", "Lemon", "Lime", "Mango", "Melon", "Nectarine"),
        "Orange",
    ),
    "Packages": ("Juice", "Milk", "Oatghurt", "Oat-Milk", "Sour-Cream"),
    "Vegetables": (
        *("Asparagus", "Aubergine", "Cabbage", "Carrots", "Cucumber", "Garlic", "Ginger", "Leek"),
    ),
}
_PRODUCTS, _COARSE = 81, 43
_PARTS = ("train", "val", "test")  # As published.


class _Product(NamedTuple):
    """A row of `classes.csv`; the products' numbers are their positions in it."""

    name: str
    coarse: str
    coarse_number: int
    department: str
    icon: str  # Path of its iconic picture.

    @property
    def trained(self) -> bool:
        return self.coarse in TRAINED[self.department]

    def entry(self, split: str, name: str, place: str) -> Entry:
        return Entry(split, name, self.name, f"{self.department}/{self.coarse}", place)


def _list_images(tree: FileTree) -> Iterator[Entry]:
    """Lists photos by product, then in the order of the published lists."""
    return _photos(tree, _products(tree), tested="test")


def _list_icons(tree: FileTree) -> Iterator[Entry]:
    """Lists the same photos, then the iconic picture of each product, which they search."""
    products = _products(tree)
    yield from _photos(tree, products, tested="query")
    for product in products:
        place = f"{tree.root / 'classes.csv'}, {product.name}"
        yield product.entry("gallery", product.icon, place)


def _photos(tree: FileTree, products: list[_Product], tested: str) -> Iterator[Entry]:
    """Lists photos; those of the products that are not trained on are in the split `tested`."""
    numbered = []
    for part in _PARTS:
        for row in read_rows(tree, f"{part}.txt"):
            example = f"{part}/Fruit/Avocado/Avocado_001.jpg, 5, 1"
            match = match_row(rf"({part}/([^/]+)/.+), (\d+), (\d+)", row, example)
            name, department, number, coarse = match[1], match[2], int(match[3]), int(match[4])
            if number >= len(products):
                raise damaged_list(row.place, f"there is no product {number}")
            product = products[number]
            if (coarse, department) != (product.coarse_number, product.department):
                problem = f"{product.name} is in {product.department}, coarse class "
                raise damaged_list(row.place, f"{problem}{product.coarse_number}")
            split = "train" if product.trained else tested
            numbered.append((number, product.entry(split, name, row.place)))
    numbered.sort(key=lambda pair: pair[0])  # Stable.
    return (entry for _, entry in numbered)


def _products(tree: FileTree) -> list[_Product]:
    """Reads `classes.csv`, and checks that it has the classes of which the split is made."""
    rows = read_rows(tree, "classes.csv")[1:]
    products = [_product(row.place, number, row.text) for number, row in enumerate(rows)]
    file = str(tree.root / "classes.csv")
    coarse = list(dict.fromkeys((each.department, each.coarse) for each in products))
    names = {each.name for each in products}
    if not len(names) == len(products) == _PRODUCTS or len(coarse) != _COARSE:
        problem = f"it lists {len(names)} products in {len(coarse)} coarse classes"
        raise damaged_list(file, f"{problem}, not {_PRODUCTS} in {_COARSE}")
    for department, trained in TRAINED.items():
        listed = tuple(name for own, name in coarse if own == department)
        if listed[: (len(listed) + 1) // 2] != trained:
            problem = f"the first half of {department}, which is trained on, is not"
            raise damaged_list(file, f"{problem} {', '.join(trained)}")
    return products


def _product(place: str, number: int, text: str) -> _Product:
    """Parses a row: product and number, coarse class and number, icon, description."""
    example = "Avocado,5,Avocado,1,/iconic-images-and-descriptions/Fruit/Avocado/a.jpg,/b.txt"
    fields = next(csv.reader([text]))
    department = pathlib.PurePosixPath(fields[4]).parts[2:3] if len(fields) == 6 else ()
    if not (department and fields[1] == str(number) and fields[3].isdecimal()):
        raise damaged_list(place, f"{text[:100]!r} is not number {number} of the form {example!r}")
    if department[0] not in TRAINED:
        raise damaged_list(place, f"there is no department {department[0]!r}")
    icon = fields[4].removeprefix("/")
    return _Product(fields[0], fields[2], int(fields[3]), department[0], icon)


_SOURCE = Source(
    folders=("GroceryStoreDataset-master", "GroceryStoreDataset", "dataset"),
    entries=(
        *("classes.csv", "train.txt", "val.txt", "test.txt", "train", "val", "test"),
        "iconic-images-and-descriptions",
    ),
    archives=(
        Archive(
            "GroceryStoreDataset-master.zip",
            unpacked="train/*",
            url=(
                "https://github.com/marcusklasson/GroceryStoreDataset/archive/refs/heads/master.zip"
            ),
        ),
    ),
    required="GroceryStoreDataset-master.zip",
    origin="https://github.com/marcusklasson/GroceryStoreDataset",
    downloads="grocery",
)


def _dataset(
    name: str,
    description: str,
    counts: dict[str, Count],
    list_images: Callable[[FileTree], Iterator[Entry]],
) -> OfficialDataset:
    counts = {"train": Count(3098, 45)} | counts
    return OfficialDataset(name, description, counts, _SOURCE, list_images)


PHOTOS = _dataset(
    "grocery",
    "Grocery Store Dataset, split by coarse class: photos search each other.",
    {"test": Count(2323, 36)},
    _list_images,
)
ICONS = _dataset(
    "grocery_icons",
    "Grocery Store Dataset, split by coarse class: photos search the iconic pictures.",
    {"query": Count(2323, 36), "gallery": Count(81, 81)},
    _list_icons,
)
