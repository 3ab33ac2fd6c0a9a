"""Cars-196: photos of cars (Krause et al., 2013), all of them or the half made to classify.

The usual split is by class over all photos. Where only `cars_train` and the devkit are at hand, the
photos in it are split by class in the same way.
"""

import functools
import io
from collections.abc import Iterator
from typing import Any

import numpy as np
from jaxtyping import Shaped

from hypjax.data.preparation.official import Count, Entry, OfficialDataset, damaged_list
from hypjax.data.preparation.sources import Archive, FileTree, Source
from hypjax.errors import UserError

_CLASSES = 196  # The first half is for training.
_TRAIN = "cars_train", "devkit/cars_train_annos.mat", "devkit/cars_meta.mat"


def _list_images(tree: FileTree) -> Iterator[Entry]:
    """Lists images by class number; the official test flag plays no part."""
    return _by_class(tree, "cars_annos.mat", "cars_annos.mat", "relative_im_path", "", boxes=False)


def _list_half(tree: FileTree, *, boxes: bool) -> Iterator[Entry]:
    """Lists the photos of `cars_train` by class number."""
    folder, annotations, classes = _TRAIN
    return _by_class(tree, annotations, classes, "fname", f"{folder}/", boxes=boxes)


def _by_class(
    tree: FileTree, annotations: str, classes: str, field: str, folder: str, *, boxes: bool
) -> Iterator[Entry]:
    """Lists annotated photos by class number.

    Args:
        tree: Files of the dataset.
        annotations: File with the photos' names, class numbers and boxes.
        classes: File with the names of the classes, which may be missing in it.
        field: Field of an annotation that holds the name.
        folder: What precedes the name in the photo's path.
        boxes: Whether photos are to be cut to their boxes.
    """
    found = np.atleast_1d(_read(tree, annotations, "annotations"))
    titles = [str(title) for title in np.atleast_1d(_read(tree, classes, "class_names", ()))]
    place = tree.root / annotations
    try:
        names = [folder + str(name) for name in found[field]]
        numbers = [int(number) for number in found["class"]]
        cut = _boxes(found) if boxes else [None] * len(names)
    except (ValueError, TypeError, IndexError) as error:
        raise _damaged(tree, annotations, error) from error
    for i in np.argsort(numbers, kind="stable"):
        where, number = f"{place}, annotation {i + 1}", numbers[i]
        if not 1 <= number <= _CLASSES:
            raise damaged_list(where, f"there is no class {number}")
        split = "train" if number <= _CLASSES // 2 else "test"
        yield Entry(split, names[i], _label(titles, number), place=where, box=cut[i])


def _boxes(annotations: Shaped[np.ndarray, " images"]) -> list[tuple[int, int, int, int]]:
    """Left, top, right and bottom, in pixels: they are counted from 1, and the last ones belong."""
    columns = [annotations[f"bbox_{side}"] for side in ("x1", "y1", "x2", "y2")]
    return [
        (left - 1, top - 1, right, bottom)
        for left, top, right, bottom in (map(int, row) for row in zip(*columns, strict=True))
    ]


def _read(tree: FileTree, file: str, variable: str, default: Any = None) -> Any:
    """Returns a variable of a MATLAB file; raises UserError if it lacks one without default."""
    import scipy.io

    content = tree.read_list(file)
    try:
        variables = scipy.io.loadmat(io.BytesIO(content), squeeze_me=True)
        return variables[variable] if default is None else variables.get(variable, default)
    except Exception as error:  # scipy raises almost anything on damaged files.
        raise _damaged(tree, file, error) from error


def _damaged(tree: FileTree, file: str, error: Exception) -> UserError:
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return UserError(
        f"{tree.root / file} is damaged, or is not the dataset's file of that name ({reason}); "
        "fetch it again"
    )


def _label(titles: list[str], number: int) -> str:
    """Returns a unique label of a class: its title, or its number if it has none."""
    title = titles[number - 1] if number <= len(titles) else ""
    if not title:
        return f"{number:03d}"
    return title if titles.count(title) == 1 else f"{title} ({number})"


_NO_HOME = "a copy (their home https://ai.stanford.edu/~jkrause/cars/car_dataset.html is gone)"


def _half(note: str, *, boxes: bool) -> OfficialDataset:
    folder, annotations, classes = _TRAIN
    return OfficialDataset(
        name="cars196",
        description="The training half of Stanford Cars, split by class: 1 to 98, 99 to 196.",
        counts={"train": Count(4052, 98), "test": Count(4092, 98)},
        source=Source(
            folders=("cars196", "stanford_cars"),
            entries=(folder, annotations, classes),
            archives=(
                Archive("cars_train.tgz", unpacked="cars_train/*"),
                Archive("car_devkit.tgz", unpacked="devkit/*.mat"),
                Archive("cars_devkit.tgz", unpacked="devkit/*.mat"),
            ),
            required="cars_train.tgz and car_devkit.tgz",
            origin=_NO_HOME,
        ),
        list_images=functools.partial(_list_half, boxes=boxes),
        note=f"the training half of Cars-196 (8144 of 16185 photos){note}: not comparable with "
        "published Recall@K",
    )


DATASET = OfficialDataset(
    name="cars196",
    description="Stanford Cars, split by class over all images: 1 to 98, 99 to 196.",
    counts={"train": Count(8054, 98), "test": Count(8131, 98)},
    source=Source(
        folders=("cars196",),
        entries=("cars_annos.mat", "car_ims"),
        archives=(Archive("car_ims.tgz", unpacked="car_ims/*"),),
        required_lists=("cars_annos.mat",),
        required="car_ims.tgz and cars_annos.mat",
        origin=_NO_HOME,
    ),
    list_images=_list_images,
    parts={
        "train": _half("", boxes=False),
        "train_boxes": _half(", cut to their boxes", boxes=True),
    },
)
