"""Writes small copies of the official datasets, in their official folders and lists.

Each function takes the folder to write to, and returns the images of each split, in the dataset's
order.
"""

import io
import itertools
import pathlib
import shutil
import zlib
from typing import NamedTuple

import numpy as np
from PIL import Image

from hypjax.data.preparation.official import read_coarse_labels

CAR_BOX = (3, 2, 18, 12)  # Of all cars: left, top, right and bottom, counted from 1.
_BOX_FIELDS = ("bbox_x1", "bbox_y1", "bbox_x2", "bbox_y2")
_CAR_NAMES = np.array([[f"Maker Model/{n} Sedan" for n in range(1, 197)]], object)


class Written(NamedTuple):
    """An image."""

    name: str
    label: str
    coarse_label: str
    content: bytes


def write_cub(root, classes=(1, 2, 101, 102), broken=None):
    """Writes root/CUB_200_2011, with the contents of broken files by name."""
    splits = {"train": [], "test": []}
    families = read_coarse_labels("cub200")
    for number, i in itertools.product(classes, range(3)):
        label = f"{number:03d}.Bird_{number}"
        name, family = f"images/{label}/Bird_{number}_{i:04d}.jpg", families[label[:3]]
        image = _written(name, label, family, broken)
        splits["train" if number <= 100 else "test"].append(image)
    return _write(root / "CUB_200_2011", splits)


def write_cars(root, classes=(1, 2, 99, 100)):
    """Writes root/cars196, with all photos in one folder."""
    splits, rows = {"train": [], "test": []}, []
    for number, official_test in itertools.product(classes, (0, 1, 0)):
        name = f"car_ims/{len(rows) + 1:06d}.jpg"
        _add_car(splits, name, number)
        rows.append((*CAR_BOX, name, number, official_test))
    fields = (*_BOX_FIELDS, "relative_im_path", "class", "test")
    rows = rows[3:] + rows[:3]  # Not in the order of classes.
    _save(root / "cars196/cars_annos.mat", fields, rows, class_names=_CAR_NAMES)
    return _write(root / "cars196", splits)


def write_cars_halves(root, halves=("cars_train", "cars_test"), doubled=False):
    """Writes root/cars_train, root/cars_test, and their annotations.

    If `doubled`, folders are in others, and a list is numbered, as in copies of Kaggle.
    """
    splits, rows = {"train": [], "test": []}, {half: [] for half in halves}
    for number, half, _ in itertools.product((1, 2, 99, 100), halves, range(2)):
        file = f"{len(rows[half]) + 1:05d}.jpg"
        _add_car(splits, f"{half}/{file}", number)
        rows[half].append((*CAR_BOX, number, file))
    devkit = root / ("car_devkit/devkit" if doubled else "devkit")
    lists = {"cars_train": devkit / "cars_train_annos.mat"}
    lists["cars_test"] = root / "cars_test_annos_withlabels.mat"
    if doubled:
        lists["cars_test"] = devkit / "cars_test_annos_withlabels (1).mat"
    for half in halves:
        _save(lists[half], (*_BOX_FIELDS, "class", "fname"), rows[half])
    _save(devkit / "cars_meta.mat", class_names=_CAR_NAMES)
    _write(root, splits)
    for folder in halves if doubled else ():
        (root / folder).rename(root / "moved")
        (root / folder).mkdir()
        (root / "moved").rename(root / folder / folder)
    return splits


def _add_car(splits, name, number):
    split = "train" if number <= 98 else "test"
    splits[split].append(_written(name, _CAR_NAMES[0, number - 1], "Sedan"))


# Departments and coarse classes of products. Of each department's classes, half are trained on.
_GROCERIES = (
    *("Fruit/Apple", "Fruit/Apple", "Fruit/Kiwi", "Fruit/Plum", "Packages/Juice", "Packages/Milk"),
    *("Vegetables/Asparagus", "Vegetables/Cabbage", "Vegetables/Leek"),
)
_TESTED_GROCERIES = ("Fruit/Plum", "Packages/Milk", "Vegetables/Leek")


def write_grocery(root, icons=False):
    """Writes root/GroceryStoreDataset; with `icons`, photos search the pictures of all products."""
    folder, tested = root / "GroceryStoreDataset/dataset", "query" if icons else "test"
    lists = {"train": [], "val": [], "test": []}
    classes = ["Class Name (str),Class ID (int),Coarse Class Name (str),Coarse Class ID (int),..."]
    splits, gallery = {"train": [], tested: []}, []
    for number, path in enumerate(_GROCERIES):
        coarse = path.split("/")[1]
        product = f"{coarse}-{number}"
        icon = f"iconic-images-and-descriptions/{path}/{product}_Iconic.jpg"
        classes.append(f"{product},{number},{coarse},0,/{icon},/{icon}.txt")
        gallery.append(_written(icon, product, path))
        _write_lines(folder / f"{icon}.txt", [f"A {coarse},", "ripe."])
        for part, rows in lists.items():
            photo = f"{part}/{path}/{product}/{product}_001.jpg"
            rows.append(f"{photo}, {number}, 0")
            split = tested if path in _TESTED_GROCERIES else "train"
            splits[split].append(_written(photo, product, path))
    for part, rows in lists.items():
        _write_lines(folder / f"{part}.txt", rows)
    _write_lines(folder / "classes.csv", classes)
    return _write(folder, splits | ({"gallery": gallery} if icons else {}))


def write_sop(root):
    """Writes root/Stanford_Online_Products: bicycles and chairs."""
    folder = root / "Stanford_Online_Products"
    splits = {"train": [], "test": []}
    for split, first in (("train", 1), ("test", 11319)):
        rows = ["image_id class_id super_class_id path"]
        for number, i in itertools.product(range(first, first + 3), range(3)):
            super_id, group = ((1, "bicycle"), (4, "chair"))[number % 2]
            name = f"{group}_final/{110000000000 + number}_{i}.JPG"
            rows.append(f"{len(rows)} {number} {super_id} {name}")
            splits[split].append(_written(name, f"{group}/{number}", group))
        _write_lines(folder / f"Ebay_{split}.txt", rows)
    return _write(folder, splits)


def write_inshop(root, photos="img"):
    """Writes root/Inshop_Clothes, whose photos are in Img/img or another folder.

    One image of a test class is a query, the others are the gallery.
    """
    folder = root / "Inshop_Clothes"
    splits, rows = {"train": [], "query": [], "gallery": []}, []
    for number, i in itertools.product(range(1, 7), range(3)):
        item, group = f"id_{number:08d}", ("WOMEN/Dresses", "MEN/Denim")[number % 2]
        name = f"img/{group}/{item}/{i + 1:02d}_1_front.jpg"
        split = "train" if number <= 3 else "gallery" if i else "query"
        splits[split].append(_written(name, item, group))
        rows.append(f"{name:<70} {item:<15} {split}")
    header = "image_name item_id evaluation_status"
    _write_lines(folder / "Eval/list_eval_partition.txt", [str(len(rows)), header, *rows])
    _write(folder / "Img", splits)
    (folder / "Img/img").rename(folder / "Img" / photos)
    return splits


def write_omniglot(root, small=False):
    """Writes root/images_background and root/images_evaluation, or the two small background sets.

    Both small sets contain the alphabet Greek, which counts only in the first one.
    """
    tested = ("Greek", "Sanskrit", "Tagalog") if small else ("Atlantean", "Greek2", "Oriya")
    alphabets = {"train": ("Balinese", "Greek", "Latin"), "test": tested}
    folders = ("background_small1", "background_small2") if small else ("background", "evaluation")
    splits = {"train": [], "test": []}
    for folder, (split, names) in zip(folders, alphabets.items(), strict=True):
        for alphabet, character, i in itertools.product(names, (1, 2), (1, 2, 3)):
            label = f"{alphabet}/character{character:02d}"
            name = f"images_{folder}/{label}/0001_{i:02d}.png"
            splits[split].append(_written(name, label, alphabet))
    _write(root, splits)
    listed = [image for image in splits["test"] if image.coarse_label not in alphabets["train"]]
    return splits | {"test": listed}


def pack(folder, archive):
    """Packs a folder under its own name into a .zip or .tgz, then removes the folder."""
    kind = "zip" if archive.suffix == ".zip" else "gztar"
    packed = shutil.make_archive(archive.with_suffix(""), kind, folder.parent, folder.name)
    pathlib.Path(packed).rename(archive)
    shutil.rmtree(folder)


def picture(name, label):
    """Returns a JPEG or one-bit PNG of noise around the colour of a class, unique per name."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    colour = np.random.default_rng(zlib.crc32(label.encode())).integers(60, 196, 3)
    height, width = rng.integers(20, 41, 2)
    noise = rng.integers(-50, 51, (height, width, 3))
    image, encoded = Image.fromarray((colour + noise).astype(np.uint8)), io.BytesIO()
    if name.endswith(".png"):
        image.convert("1").save(encoded, "PNG")
    else:
        image.save(encoded, "JPEG")
    return encoded.getvalue()


def _written(name, label, coarse_label="", broken=None):
    content = (broken or {}).get(name)
    return Written(name, label, coarse_label, picture(name, label) if content is None else content)


def _write(folder, splits):
    """Writes the images, and in each folder a macOS file, as copies often contain."""
    for written in (w for part in splits.values() for w in part):
        path = folder / written.name
        if not path.parent.exists():
            path.parent.mkdir(parents=True)
            path.with_name(f"._{path.name}").write_bytes(b"macOS file")
        path.write_bytes(written.content)
    return splits


def _write_lines(path, lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines))


def _save(path, fields=(), rows=(), **variables):
    """Writes struct arrays of one row, as in the official MATLAB files."""
    import scipy.io

    if rows:
        variables["annotations"] = np.empty((1, len(rows)), [(field, object) for field in fields])
        variables["annotations"][0, :] = rows
    path.parent.mkdir(parents=True, exist_ok=True)
    scipy.io.savemat(path, variables)
