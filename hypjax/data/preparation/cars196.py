"""Cars-196: photos of cars (Krause et al., 2013), split by class.

Photos lie in one folder, or in the two halves of the classification task. With only `cars_train`
and the devkit, that half is split by class in the same way. Coarse classes are nine body types: the
last body type in a class's name or, for names without one or with two, the one in the table of
Chang et al. (CVPR 2021).
"""

import io
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from hypjax.data.preparation import official
from hypjax.data.preparation.official import Archive, Count, Entry, FileTree, OfficialDataset
from hypjax.errors import UserError

_CLASSES = 196  # The first half is for training.
_NOTE = "the training half of Cars-196 (8144 of 16185 photos)"
_ALL, _TEST = "cars_annos.mat", "cars_test_annos_withlabels.mat"
_TRAIN_FOLDER = {"cars_train_annos.mat": "cars_train/"}  # Folder of photos, by annotations' file.
_DEVKIT = "devkit", "car_devkit"
_NO_HOME = "a copy (their home https://ai.stanford.edu/~jkrause/cars/car_dataset.html is gone)"
_BODY_TYPES = re.compile(r"(?:Cab|Convertible|Coupe|Hatchback|Minivan|Sedan|SUV|Van|Wagon)\b")


def _list_all(tree: FileTree) -> Iterator[Entry]:
    """Lists the photos of the one folder that holds them all, or of the two halves."""
    if any(name.startswith("car_ims/") for name in tree.files):
        return _list_images(tree, {_ALL: ""}, _ALL)
    if _find(tree, _TEST) not in tree.files:
        raise UserError(
            f"{tree.root} has neither car_ims nor {_TEST}, which labels cars_test; get one of "
            "them, or prepare only cars_train with --part=train"
        )
    return _list_images(tree, _TRAIN_FOLDER | {_TEST: "cars_test/"})


def _list_images(
    tree: FileTree, folders: Mapping[str, str], names: str = "cars_meta.mat", boxes: bool = False
) -> Iterator[Entry]:
    """Lists photos by class; `folders` are the folders of photos, by file of annotations."""
    class_names = _read(tree, names, "class_names")
    rows = []
    for file, folder in folders.items():
        rows += [(folder, row) for row in _read(tree, file, "annotations")]
    body_types = official.read_coarse_labels("cars196")
    # Kaggle's copies may hold the folders in folders of the same name.
    files = {"/".join(file.split("/")[-2:]): file for file in tree.files}
    try:
        for folder, row in sorted(rows, key=lambda pair: int(pair[1]["class"])):
            number = int(row["class"])
            split = "train" if number <= _CLASSES // 2 else "test"  # Not the official test flag.
            name = f"{folder}{row['fname']}" if folder else str(row["relative_im_path"])
            class_name = str(class_names[number - 1])
            body_type = body_types.get(class_name) or "".join(_BODY_TYPES.findall(class_name)[-1:])
            box = _box(row) if boxes else None
            yield Entry(split, name, class_name, body_type, files.get(name, name), box)
    except (ValueError, TypeError, IndexError) as error:
        raise tree.damaged("", f"annotations cannot be read ({error})") from error


def _box(annotation: Any) -> tuple[int, int, int, int]:
    """Left, top, right and bottom. Annotations count pixels from 1, and include the last one."""
    left, top, right, bottom = (int(annotation[f"bbox_{x}"]) for x in ("x1", "y1", "x2", "y2"))
    return left - 1, top - 1, right, bottom


def _find(tree: FileTree, name: str) -> str:
    """Finds a MATLAB file in any folder, perhaps numbered by Kaggle; otherwise returns its name."""
    pattern = re.compile(rf"(.*/)?{name.removesuffix('.mat')}( \(\d+\))?\.mat")
    return min(filter(pattern.fullmatch, tree.files), key=len, default=name)


def _read(tree: FileTree, name: str, variable: str) -> np.ndarray:
    """Reads an array from a MATLAB file."""
    import scipy.io

    file = _find(tree, name)
    content = tree.read_list(file)
    try:
        return np.atleast_1d(scipy.io.loadmat(io.BytesIO(content), squeeze_me=True)[variable])
    except Exception as error:  # scipy raises almost anything on damaged files.
        raise tree.damaged(file, f"{variable} cannot be read ({type(error).__name__})") from error


_TRAIN_PART = OfficialDataset(
    name="cars196",
    counts={"train": Count(4052, 98), "test": Count(4092, 98)},
    folders=("cars196", "stanford_cars"),
    entries=("cars_train", *_DEVKIT),
    archives=(
        Archive("cars_train.tgz", unpacked="cars_train/*"),
        Archive("car_devkit.tgz", unpacked="devkit/*.mat"),
    ),
    source=f"cars_train.tgz and car_devkit.tgz from {_NO_HOME}",
    list_images=lambda tree: _list_images(tree, _TRAIN_FOLDER),
    note=f"{_NOTE}: not comparable with published Recall@K",
)
_TRAIN_BOXES_PART = _TRAIN_PART._replace(
    list_images=lambda tree: _list_images(tree, _TRAIN_FOLDER, boxes=True),
    note=f"{_NOTE}, cut to their boxes: not comparable with published Recall@K",
)
DATASET = OfficialDataset(
    name="cars196",
    counts={"train": Count(8054, 98), "test": Count(8131, 98)},
    folders=("cars196", "stanford_cars"),
    entries=(
        *("cars_annos.mat", "car_ims", "cars_train", "cars_test", *_DEVKIT),
        "cars_test_annos_withlabels*.mat",
    ),
    archives=(
        Archive("car_ims.tgz", unpacked="car_ims/*"),
        *_TRAIN_PART.archives,
        Archive("cars_test.tgz", unpacked="cars_test/*"),
    ),
    source=(
        "car_ims.tgz and cars_annos.mat, or cars_train.tgz, cars_test.tgz, car_devkit.tgz and "
        f"{_TEST}, from {_NO_HOME}"
    ),
    list_images=_list_all,
    parts={"train": _TRAIN_PART, "train_boxes": _TRAIN_BOXES_PART},
)
