"""What each benchmark looks like on disk: where its files are, and which images they list.

Class numbers, splits and counts are those of the official lists and of the protocol by which
retrieval is reported on them (Ermolov et al., CVPR 2022, section 4.1, and the papers it follows).
"""

import contextlib
import dataclasses
import functools
import io
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from hypjax.data.preparation.sources import Archive, Source, Tree
from hypjax.errors import UserError
from hypjax.system import console

_CUB_CLASSES, _CARS_CLASSES = 200, 196  # Training classes come first, half of all.


class Count(NamedTuple):
    """How much a split has.

    Attributes:
        images: Number of them.
        classes: Number of their classes.
    """

    images: int
    classes: int


class Listed(NamedTuple):
    """One image that a dataset lists.

    Attributes:
        name: Its path within the dataset, with '/'; unique.
        label: Name of its class, unique within the dataset.
        read: Returns the file's bytes as they are; threads may call it at once. It raises OSError
            where it cannot.
        superlabel: Name of the coarser class; '' where the dataset has none.
    """

    name: str
    label: str
    read: Callable[[], bytes]
    superlabel: str = ""


Splits = dict[str, list[Listed]]


@dataclasses.dataclass(frozen=True)
class Layout:
    """A benchmark on disk.

    Attributes:
        name: Of the dataset.
        counts: What each split of the complete dataset has.
        source: Where its files are.
        list_images: Lists each split's images that are there.
    """

    name: str
    counts: Mapping[str, Count]
    source: Source
    list_images: Callable[[Tree], Splits]

    @contextlib.contextmanager
    def open(self, manual_dir: pathlib.Path | None, downloads: pathlib.Path) -> Iterator[Splits]:
        """Finds the files, or downloads them, and lists the images of each split that are there.

        Images that the lists name but that are not there are left out, so a split may be empty.

        Args:
            manual_dir: The dataset's folder, or one that holds it, or its archives; None: they are
                looked for in `downloads`, and downloaded if they can be.
            downloads: For downloads, and for what is unpacked for now.

        Returns:
            The images by split, in the dataset's own order of classes; they can be read within the
            body.

        Raises:
            UserError: No images are found, or a list or an archive is damaged.
        """
        with self.source.open(manual_dir, downloads) as tree:
            splits = self.list_images(tree)
            if not any(splits.values()):
                raise UserError(f"{tree.root} has no images of {self.name}; {self.source.advice}")
            yield splits


class _Row(NamedTuple):
    """A line of a list."""

    place: str  # For messages: file and line.
    text: str


def _rows(tree: Tree, name: str) -> list[_Row]:
    """Lines of a list, but for empty ones."""
    try:
        lines = tree.read_list(name).decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"{tree.root / name} is damaged: it is no text; fetch it again") from error
    numbered = enumerate((line.strip() for line in lines), 1)
    return [_Row(f"{tree.root / name}, line {n}", line) for n, line in numbered if line]


def _damaged(place: str, what: str) -> UserError:
    return UserError(f"{place}: {what}; the list is damaged, fetch it again")


def _match(pattern: str, row: _Row, layout: str) -> re.Match[str]:
    """A line's fields."""
    match = re.fullmatch(pattern, row.text)
    if match is None:
        raise _damaged(row.place, f"{row.text[:100]!r} is not of the form {layout!r}")
    return match


class _Names:
    """Watches the names that a list has."""

    def __init__(self) -> None:
        self._seen: set[str] = set()
        self._absent: list[str] = []

    def check(self, name: str, place: str) -> None:
        """Refuses those that come twice, or that lead out of the dataset's folder."""
        if name.startswith("/") or ".." in name.split("/"):
            raise _damaged(place, f"{name!r} leads out of the dataset's folder")
        if name in self._seen:
            raise _damaged(place, f"{name!r} is listed twice")
        self._seen.add(name)

    def there(self, name: str, tree: Tree) -> bool:
        """Whether there is a file of this name."""
        if name not in tree.files:
            self._absent.append(name)
        return name in tree.files

    def tell(self) -> None:
        """Tells of those without a file."""
        if self._absent:
            more = f", and {len(self._absent) - 1} more" if len(self._absent) > 1 else ""
            console.warn(f"listed but not there: {self._absent[0]}{more}")


def _listed(tree: Tree, name: str, file: str, label: str, superlabel: str = "") -> Listed:
    return Listed(name, label, functools.partial(tree.read, file), superlabel)


def _list_cub(tree: Tree) -> Splits:
    """Lists by class number, then path; the class is the folder, as image_class_labels.txt says."""
    names, found = _Names(), []
    for row, image_id, path in _cub_paths(tree):
        names.check(path, row.place)
        number = int(path[:3])
        if not 1 <= number <= _CUB_CLASSES:
            raise _damaged(row.place, f"there is no class {number}")
        found.append((number, path, image_id, row))
    _check_cub_labels(tree, found)
    splits: Splits = {"train": [], "test": []}
    for number, path, _, _ in sorted(found):
        name = f"images/{path}"
        if names.there(name, tree):
            split = "train" if number <= _CUB_CLASSES // 2 else "test"
            splits[split].append(_listed(tree, name, name, label=path.split("/")[0]))
    names.tell()
    return splits


def _cub_paths(tree: Tree) -> Iterator[tuple[_Row, str, str]]:
    """Row, number and path of each image of images.txt; without that file, of the folders."""
    if "images.txt" in tree.files:
        for row in _rows(tree, "images.txt"):
            match = _match(r"(\d+)\s+(\d{3}\.[^/]+/[^/]+)", row, "1 001.Class/image.jpg")
            yield row, match[1], match[2]
        return
    for name in tree.files:
        if match := re.fullmatch(r"images/(\d{3}\.[^/]+/[^/]+\.jpe?g)", name, re.IGNORECASE):
            yield _Row(str(tree.root / name), name), "", match[1]


def _check_cub_labels(tree: Tree, found: list[tuple[int, str, str, _Row]]) -> None:
    """Compares the labels, where there are any, with the folders."""
    if not {"images.txt", "image_class_labels.txt"} <= tree.files:
        return
    rows = _rows(tree, "image_class_labels.txt")
    labels = dict(_match(r"(\d+)\s+(\d+)", row, "1 1").groups() for row in rows)
    for number, path, image_id, row in found:
        if labels.get(image_id) != str(number):
            told = f"class {labels[image_id]}" if image_id in labels else "no class"
            raise _damaged(row.place, f"{path} has {told} in image_class_labels.txt")


def _list_cars(tree: Tree) -> Splits:
    """Lists by class number; the official test flag has no part in it."""
    place = tree.root / "cars_annos.mat"
    files, numbers, titles = _read_annotations(place, tree.read_list("cars_annos.mat"))
    labels = {number: _title(titles, number) for number in set(numbers)}
    names = _Names()
    splits: Splits = {"train": [], "test": []}
    for i in np.argsort(numbers, kind="stable"):
        name, number = files[i], numbers[i]
        names.check(name, f"{place}, annotation {i + 1}")
        if not 1 <= number <= _CARS_CLASSES:
            raise _damaged(f"{place}, annotation {i + 1}", f"there is no class {number}")
        if names.there(name, tree):
            split = "train" if number <= _CARS_CLASSES // 2 else "test"
            splits[split].append(_listed(tree, name, name, labels[number]))
    names.tell()
    return splits


def _read_annotations(
    place: pathlib.Path, content: bytes
) -> tuple[list[str], list[int], list[str]]:
    """Paths, class numbers, and the classes' names where there are any."""
    import scipy.io

    try:
        content = scipy.io.loadmat(io.BytesIO(content), squeeze_me=True)
        annotations = np.atleast_1d(content["annotations"])
        names = [str(name) for name in annotations["relative_im_path"]]
        numbers = [int(number) for number in annotations["class"]]
        titles = [str(title) for title in np.atleast_1d(content.get("class_names", []))]
    except Exception as error:  # Damage makes scipy raise almost anything.
        raise UserError(
            f"{place} is damaged, or not the file of that name that lists 16185 annotations "
            f"({str(error).splitlines()[0] if str(error) else type(error).__name__}); "
            "fetch it again"
        ) from error
    return names, numbers, titles


def _title(titles: list[str], number: int) -> str:
    """What a class is called; its number, where it has no name of its own."""
    title = titles[number - 1] if number <= len(titles) else ""
    if not title:
        return f"{number:03d}"
    return title if titles.count(title) == 1 else f"{title} ({number})"


def _list_sop(tree: Tree) -> Splits:
    """Lists in the order of the lists; the super-class is the folder."""
    columns = "image_id class_id super_class_id path"
    names = _Names()
    splits: Splits = {"train": [], "test": []}
    for split, listed in splits.items():
        file = f"Ebay_{split}.txt"
        rows = _rows(tree, file)
        if not rows or rows[0].text.split() != columns.split():
            raise _damaged(str(tree.root / file), f"it does not begin with {columns!r}")
        for row in rows[1:]:
            pattern = r"\d+\s+(\d+)\s+\d+\s+(([^/\s]+)_final/[^/]+)"
            number, name, group = _match(pattern, row, "1 1 1 bicycle_final/1_0.JPG").groups()
            names.check(name, row.place)
            if names.there(name, tree):
                listed.append(_listed(tree, name, name, f"{group}/{number}", group))
    names.tell()
    return splits


def _list_inshop(tree: Tree) -> Splits:
    """Lists in the order of the list; the super-class is the category in the path."""
    names = _Names()
    splits: Splits = {"train": [], "query": [], "gallery": []}
    for row in _inshop_rows(tree):
        pattern = r"(img/(\S+)/[^/\s]+/[^/\s]+)\s+(\S+)\s+(\S+)"
        match = _match(pattern, row, "img/WOMEN/Dresses/id_00000001/1.jpg id_00000001 train")
        name, group, item, status = match.groups()
        names.check(name, row.place)
        if status not in splits:
            raise _damaged(row.place, f"{status!r} is not one of {', '.join(splits)}")
        file = f"Img/{name}" if f"Img/{name}" in tree.files else name
        if names.there(file, tree):
            splits[status].append(_listed(tree, name, file, item, group))
    names.tell()
    return splits


def _inshop_rows(tree: Tree) -> list[_Row]:
    """Lines of the list that tell of images, as many as it says."""
    file, columns = "list_eval_partition.txt", "image_name item_id evaluation_status"
    if f"Eval/{file}" in tree.files or file not in tree.files:
        file = f"Eval/{file}"
    rows = _rows(tree, file)
    begins = [row.text.split() for row in rows[:2]]
    if len(begins) < 2 or not begins[0][0].isdecimal() or begins[1] != columns.split():
        place = str(tree.root / file)
        raise _damaged(place, f"it does not begin with a count and {columns!r}")
    count, _, *rows = rows
    if int(count.text) != len(rows):
        raise _damaged(count.place, f"it promises {count.text} images and lists {len(rows)}")
    return rows


def _list_omniglot(tree: Tree) -> Splits:
    """Lists by path; of the small sets, the second without the alphabets of the first."""
    folders = ("images_background", "images_evaluation")
    if any(name.split("/")[0] in folders for name in tree.files):
        train, test = (_drawings(tree, folder) for folder in folders)
        return {"train": train, "test": test}
    train, test = (_drawings(tree, f"images_background_small{i}") for i in (1, 2))
    alphabets = {drawing.superlabel for drawing in train}
    if both := sorted(alphabets & {drawing.superlabel for drawing in test}):
        console.say(f"in both small sets, and so in train only: {', '.join(both)}")
    return {"train": train, "test": [d for d in test if d.superlabel not in alphabets]}


def _drawings(tree: Tree, folder: str) -> list[Listed]:
    pattern = re.compile(rf"{folder}/(([^/]+)/[^/]+)/[^/]+\.png")
    matches = (match for name in sorted(tree.files) if (match := pattern.fullmatch(name)))
    return [_listed(tree, m[0], m[0], label=m[1], superlabel=m[2]) for m in matches]


_OMNIGLOT = "https://github.com/brendenlake/omniglot/raw/master/python"

# Addresses and checksums are those that tensorflow_datasets lists.
_LAYOUTS = (
    Layout(
        name="cub200",
        counts={"train": Count(5864, 100), "test": Count(5924, 100)},
        source=Source(
            name="cub200",
            folders=("CUB_200_2011",),
            entries=("images.txt", "image_class_labels.txt", "images/[0-9][0-9][0-9].*"),
            archives=(
                Archive(
                    "CUB_200_2011.tgz",
                    holds="images/[0-9]*",
                    url="https://data.caltech.edu/records/65de6-vp158/files/CUB_200_2011.tgz?download=1",
                    sha256="0c685df5597a8b24909f6a7c9db6d11e008733779a671760afef78feb49bf081",
                ),
            ),
            wanted="CUB_200_2011.tgz",
            origin="https://data.caltech.edu/records/65de6-vp158",
        ),
        list_images=_list_cub,
    ),
    Layout(
        name="cars196",
        counts={"train": Count(8054, 98), "test": Count(8131, 98)},
        source=Source(
            name="cars196",
            folders=("cars196",),
            entries=("cars_annos.mat", "car_ims"),
            archives=(Archive("car_ims.tgz", holds="car_ims/*"),),
            beside=("cars_annos.mat",),
            wanted="car_ims.tgz and cars_annos.mat",
            origin=(
                "a copy (their home https://ai.stanford.edu/~jkrause/cars/car_dataset.html is gone)"
            ),
        ),
        list_images=_list_cars,
    ),
    Layout(
        name="sop",
        counts={"train": Count(59551, 11318), "test": Count(60502, 11316)},
        source=Source(
            name="sop",
            folders=("Stanford_Online_Products",),
            entries=("Ebay_train.txt", "Ebay_test.txt", "*_final"),
            archives=(Archive("Stanford_Online_Products.zip", holds="*_final"),),
            wanted="Stanford_Online_Products.zip",
            origin="https://cvgl.stanford.edu/projects/lifted_struct/",
        ),
        list_images=_list_sop,
    ),
    Layout(
        name="inshop",
        counts={
            "train": Count(25882, 3997),
            "query": Count(14218, 3985),
            "gallery": Count(12612, 3985),
        },
        source=Source(
            name="inshop",
            folders=("Inshop_Clothes", "In-shop Clothes Retrieval Benchmark"),
            entries=(
                *("Eval/list_eval_partition.txt", "list_eval_partition.txt"),
                *("Img/img", "img"),
            ),
            archives=(Archive("Img/img.zip", "Img/img/*"), Archive("img.zip", "img/*")),
            wanted="Eval/list_eval_partition.txt and Img/img.zip",
            origin=(
                "the 'In-shop Clothes Retrieval Benchmark', on request at "
                "https://mmlab.ie.cuhk.edu.hk/projects/DeepFashion.html"
            ),
        ),
        list_images=_list_inshop,
    ),
    Layout(
        name="omniglot",
        counts={"train": Count(19280, 964), "test": Count(13180, 659)},
        source=Source(
            name="omniglot",
            folders=("omniglot/python", "omniglot", "omniglot-py"),
            entries=("images_background", "images_evaluation", "images_background_small[12]"),
            archives=(
                Archive(
                    "images_background.zip",
                    holds="images_background/*",
                    url=f"{_OMNIGLOT}/images_background.zip",
                    sha256="ad41ab679c8b5d90b271ef46be6987cc81211774a695c29dcc5367b2b26ee640",
                ),
                Archive(
                    "images_evaluation.zip",
                    holds="images_evaluation/*",
                    url=f"{_OMNIGLOT}/images_evaluation.zip",
                    sha256="1f61a8f3366785b057fc117d9228e78a16e3d976c8953b2a10fcc74cf0609cee",
                ),
                Archive("images_background_small1.zip", "images_background_small1/*"),
                Archive("images_background_small2.zip", "images_background_small2/*"),
            ),
            wanted="images_background.zip and images_evaluation.zip",
            origin="https://github.com/brendenlake/omniglot/tree/master/python",
        ),
        list_images=_list_omniglot,
    ),
)
LAYOUTS = {layout.name: layout for layout in _LAYOUTS}
