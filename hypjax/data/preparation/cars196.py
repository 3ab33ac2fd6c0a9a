"""Cars-196: photos of cars (Krause et al., 2013)."""

import io
import pathlib
from collections.abc import Iterator

import numpy as np

from hypjax.data.preparation.official import Count, Entry, OfficialDataset, damaged_list
from hypjax.data.preparation.sources import Archive, FileTree, Source
from hypjax.errors import UserError

_CLASSES = 196  # The first half is for training.


def _list_images(tree: FileTree) -> Iterator[Entry]:
    """Lists images by class number; the official test flag plays no part."""
    file = tree.root / "cars_annos.mat"
    files, numbers, titles = _read_annotations(file, tree.read_list("cars_annos.mat"))
    for i in np.argsort(numbers, kind="stable"):
        place, number = f"{file}, annotation {i + 1}", numbers[i]
        if not 1 <= number <= _CLASSES:
            raise damaged_list(place, f"there is no class {number}")
        split = "train" if number <= _CLASSES // 2 else "test"
        yield Entry(split, files[i], _label(titles, number), place=place)


def _read_annotations(
    place: pathlib.Path, content: bytes
) -> tuple[list[str], list[int], list[str]]:
    """Returns paths and class numbers of the images, and the titles of the classes, if any."""
    import scipy.io

    try:
        content = scipy.io.loadmat(io.BytesIO(content), squeeze_me=True)
        annotations = np.atleast_1d(content["annotations"])
        names = [str(name) for name in annotations["relative_im_path"]]
        numbers = [int(number) for number in annotations["class"]]
        titles = [str(title) for title in np.atleast_1d(content.get("class_names", []))]
    except Exception as error:  # scipy raises almost anything on damaged files.
        raise UserError(
            f"{place} is damaged, or is not the file of that name that lists 16185 annotations "
            f"({str(error).splitlines()[0] if str(error) else type(error).__name__}); "
            "fetch it again"
        ) from error
    return names, numbers, titles


def _label(titles: list[str], number: int) -> str:
    """Returns a unique label of a class: its title, or its number if it has none."""
    title = titles[number - 1] if number <= len(titles) else ""
    if not title:
        return f"{number:03d}"
    return title if titles.count(title) == 1 else f"{title} ({number})"


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
        origin="a copy (their home https://ai.stanford.edu/~jkrause/cars/car_dataset.html is gone)",
    ),
    list_images=_list_images,
)
