"""Cars-196: photos of cars (Krause et al., 2013), all of them or the half made to classify.

The usual split is by class over all photos. Where only `cars_train` and the devkit are at hand, the
photos in it are split by class in the same way.
"""

import io
from collections.abc import Iterator
from typing import Any

import numpy as np

from hypjax.data.preparation.official import Archive, Count, Entry, FileTree, OfficialDataset

_CLASSES = 196  # The first half is for training.
_ALL = "cars_annos.mat"
_NOTE = "the training half of Cars-196 (8144 of 16185 photos)"
_HALF = "devkit/cars_train_annos.mat", "devkit/cars_meta.mat"
_NO_HOME = "a copy (their home https://ai.stanford.edu/~jkrause/cars/car_dataset.html is gone)"


def _list_images(
    tree: FileTree, annotations: str, titles: str, path: str, folder: str = "", boxes: bool = False
) -> Iterator[Entry]:
    """Lists the photos of a folder by class number; the official test flag plays no part.

    `annotations` and `titles` are MATLAB files; the field `path` of an annotation holds a photo's.
    """
    photos, names = _read(tree, annotations, "annotations"), _read(tree, titles, "class_names")
    try:
        for i in np.argsort([int(number) for number in photos["class"]], kind="stable"):
            number = int(photos["class"][i])
            split = "train" if number <= _CLASSES // 2 else "test"
            box = _box(photos[i]) if boxes else None
            yield Entry(split, f"{folder}{photos[path][i]}", str(names[number - 1]), box=box)
    except (ValueError, TypeError, IndexError) as error:
        raise tree.damaged("", f"annotations cannot be read ({error})") from error


def _box(annotation: Any) -> tuple[int, int, int, int]:
    """Left, top, right and bottom, in pixels: they are counted from 1, and the last ones belong."""
    sides = (f"bbox_{side}" for side in ("x1", "y1", "x2", "y2"))
    left, top, right, bottom = (int(annotation[side]) for side in sides)
    return left - 1, top - 1, right, bottom


def _read(tree: FileTree, file: str, variable: str) -> Any:
    """Returns a variable of a MATLAB file, or raises UserError."""
    import scipy.io

    content = tree.read_list(file)
    try:
        return np.atleast_1d(scipy.io.loadmat(io.BytesIO(content), squeeze_me=True)[variable])
    except Exception as error:  # scipy raises almost anything on damaged files.
        problem = f"{variable} cannot be read ({type(error).__name__})"
        raise tree.damaged(file, problem) from error


_TRAINING_HALF = OfficialDataset(
    name="cars196",
    description="The training half of Stanford Cars, split by class: 1 to 98, 99 to 196.",
    counts={"train": Count(4052, 98), "test": Count(4092, 98)},
    folders=("cars196", "stanford_cars"),
    entries=("cars_train", *_HALF),
    archives=(
        Archive("cars_train.tgz", unpacked="cars_train/*"),
        Archive("car_devkit.tgz", unpacked="devkit/*.mat"),
    ),
    required="cars_train.tgz and car_devkit.tgz",
    origin=_NO_HOME,
    list_images=lambda tree: _list_images(tree, *_HALF, "fname", "cars_train/"),
    note=f"{_NOTE}: not comparable with published Recall@K",
)
_CUT_TO_BOXES = _TRAINING_HALF._replace(
    list_images=lambda tree: _list_images(tree, *_HALF, "fname", "cars_train/", boxes=True),
    note=f"{_NOTE}, cut to their boxes: not comparable with published Recall@K",
)
DATASET = OfficialDataset(
    name="cars196",
    description="Stanford Cars, split by class over all images: 1 to 98, 99 to 196.",
    counts={"train": Count(8054, 98), "test": Count(8131, 98)},
    folders=("cars196",),
    entries=(_ALL, "car_ims"),
    archives=(Archive("car_ims.tgz", unpacked="car_ims/*"),),
    required="car_ims.tgz and cars_annos.mat",
    origin=_NO_HOME,
    list_images=lambda tree: _list_images(tree, _ALL, _ALL, "relative_im_path"),
    parts={"train": _TRAINING_HALF, "train_boxes": _CUT_TO_BOXES},
)
