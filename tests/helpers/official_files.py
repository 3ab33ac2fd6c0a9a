"""Writes small copies of the official datasets, in their official folders and lists.

Each function takes the folder to write to; some take the number of images per class, and the
content of broken files by image name. It returns the images of each split, in the dataset's order.
"""

import io
import pathlib
import shutil
import zlib
from typing import NamedTuple

import numpy as np
from PIL import Image

_BOX = ("bbox_x1", "bbox_y1", "bbox_x2", "bbox_y2")  # Of the annotations of cars.


class Written(NamedTuple):
    """One image: its name in the dataset, class, group of classes, and file content."""

    name: str
    label: str
    coarse_label: str
    content: bytes


def write_cub(root, classes=(1, 2, 101, 102), images=3, broken=None):
    """Writes root/CUB_200_2011; class numbers above 100 are in the test split."""
    splits = {"train": [], "test": []}
    for number in classes:
        label = f"{number:03d}.Bird_{number}"
        names = [f"images/{label}/Bird_{number}_{i:04d}.jpg" for i in range(images)]
        written = [_written(name, label, broken=broken) for name in names]
        splits["train" if number <= 100 else "test"] += written
    return _write(root / "CUB_200_2011", splits)


def write_cars(root, classes=(1, 2, 99, 100), images=3, half_box=None):
    """Writes root/cars196; class numbers above 98 are in the test split.

    With a box for all images, writes root/cars_train and root/devkit, which hold the training half.
    """
    splits, rows = {"train": [], "test": []}, []
    titles = {"class_names": np.array([[f"Maker Model/{n} Sedan" for n in range(1, 197)]], object)}
    for number in classes:
        for i in range(images):
            file, (title,) = f"{len(rows) + 1:06d}.jpg", titles["class_names"][:, number - 1]
            name = f"{'cars_train' if half_box else 'car_ims'}/{file}"
            splits["train" if number <= 98 else "test"].append(_written(name, title))
            named = (number, file) if half_box else (name, number, i % 2)
            rows.append((*(half_box or (1, 2, 18, 19)), *named))
    if half_box:
        _save(root / "devkit/cars_meta.mat", **titles)
        path, fields, titles, folder = (
            root / "devkit/cars_train_annos.mat",
            ("class", "fname"),
            {},
            root,
        )
    else:
        path, fields = root / "cars196/cars_annos.mat", ("relative_im_path", "class", "test")
        folder = root / "cars196"
    _save(path, annotations=_struct((*_BOX, *fields), rows), **titles)
    return _write(folder, splits)


def write_cars_halves(root, classes=(1, 2, 99, 100), doubled=False):
    """Writes root/cars_train, root/cars_test, and their annotations.

    If `doubled`, folders are in others, and a list is numbered, as in copies of Kaggle.
    """
    splits, rows = {"train": [], "test": []}, {"cars_train": [], "cars_test": []}
    devkit = root / ("car_devkit/devkit" if doubled else "devkit")
    titles = np.array([[f"Maker Model/{n} Sedan" for n in range(1, 197)]], object)
    for number in classes:
        for folder, annotations in rows.items():
            for _ in range(2):
                file = f"{len(annotations) + 1:05d}.jpg"
                image = _written(f"{folder}/{file}", titles[0, number - 1])
                splits["train" if number <= 98 else "test"].append(image)
                annotations.append((1, 2, 18, 19, number, file))
    _save(devkit / "cars_meta.mat", class_names=titles)
    files = devkit / "cars_train_annos.mat", root / "cars_test_annos_withlabels.mat"
    if doubled:
        files = files[0], devkit / "cars_test_annos_withlabels (1).mat"
    for file, annotations in zip(files, rows.values(), strict=True):
        _save(file, annotations=_struct((*_BOX, "class", "fname"), annotations))
    _write(root, splits)
    for folder in rows if doubled else ():
        (root / folder).rename(root / "moved")
        (root / folder).mkdir()
        (root / "moved").rename(root / folder / folder)
    return splits


# Coarse classes in the order of the list: half of each department's, rounded up, are trained on.
_GROCERIES = {
    "Fruit": ("Apple", "Kiwi", "Plum"),
    "Packages": ("Juice", "Milk"),
    "Vegetables": ("Asparagus", "Cabbage", "Leek"),
}


def write_grocery(root, icons=False):
    """Writes root/GroceryStoreDataset: apples of two kinds, and one product of other classes.

    With `icons`, photos search the pictures of all products.
    """
    folder, tested = root / "GroceryStoreDataset/dataset", "query" if icons else "test"
    lists = {part: [] for part in ("train", "val", "test")}
    classes = ["Class Name (str),Class ID (int),Coarse Class Name (str),Coarse Class ID (int),..."]
    splits, gallery = {"train": [], tested: []}, []
    for department, names in _GROCERIES.items():
        for place, coarse in enumerate(names):
            for i in range(2 if coarse == "Apple" else 1):
                number, product, path = len(classes) - 1, f"{coarse}-{i}", f"{department}/{coarse}"
                icon = f"iconic-images-and-descriptions/{path}/{product}_Iconic.jpg"
                classes.append(f"{product},{number},{coarse},0,/{icon},/{icon}.txt")
                gallery.append(_written(icon, product, path))
                split = "train" if place < (len(names) + 1) // 2 else tested
                for part, rows in lists.items():
                    photo = f"{part}/{path}/{product}/{product}_001.jpg"
                    rows.append(f"{photo}, {number}, 0")
                    splits[split].append(_written(photo, product, path))
    for part, rows in lists.items():
        _write_lines(folder / f"{part}.txt", rows)
    _write_lines(folder / "classes.csv", classes)
    return _write(folder, splits | ({"gallery": gallery} if icons else {}))


def write_sop(root):
    """Writes root/Stanford_Online_Products: bicycles and chairs."""
    folder = root / "Stanford_Online_Products"
    splits, image_id = {"train": [], "test": []}, 0
    for split, first in (("train", 1), ("test", 11319)):
        rows = ["image_id class_id super_class_id path"]
        for number in range(first, first + 3):
            super_id, group = ((1, "bicycle"), (4, "chair"))[number % 2]
            for i in range(3):
                image_id += 1
                name = f"{group}_final/{110000000000 + number}_{i}.JPG"
                rows.append(f"{image_id} {number} {super_id} {name}")
                splits[split].append(_written(name, f"{group}/{number}", group))
        _write_lines(folder / f"Ebay_{split}.txt", rows)
    return _write(folder, splits)


def write_inshop(root, photos="img"):
    """Writes root/Inshop_Clothes, whose photos are in Img/img or another folder.

    Of a test class, one image is a query, the others the gallery.
    """
    folder = root / "Inshop_Clothes"
    splits, rows = {"train": [], "query": [], "gallery": []}, []
    for number in range(1, 7):
        item, group = f"id_{number:08d}", ("WOMEN/Dresses", "MEN/Denim")[number % 2]
        for i in range(3):
            name = f"img/{group}/{item}/{i + 1:02d}_1_front.jpg"
            split = "train" if number <= 3 else "gallery" if i else "query"
            splits[split].append(_written(name, item, group))
            rows.append(f"{name:<70} {item:<15} {split}")
    header = "image_name item_id evaluation_status"
    _write_lines(folder / "Eval/list_eval_partition.txt", [str(len(rows)), header, *rows])
    written = _write(folder, splits, subfolder="Img")
    (folder / "Img/img").rename(folder / "Img" / photos)
    return written


def write_omniglot(root, small=False):
    """Writes root/images_background and root/images_evaluation, or the two small background sets.

    Both small sets contain the alphabet Greek, which counts only in the first one.
    """
    alphabets = {"train": ("Balinese", "Greek", "Latin"), "test": ("Atlantean", "Greek2", "Oriya")}
    folders = {"train": "images_background", "test": "images_evaluation"}
    if small:
        alphabets["test"] = ("Greek", "Sanskrit", "Tagalog")
        folders = {split: f"images_background_small{i}" for i, split in enumerate(folders, 1)}
    written, drawn = {"train": [], "test": []}, 0
    for split, folder in folders.items():
        for alphabet in alphabets[split]:
            for character in (1, 2):
                label = f"{alphabet}/character{character:02d}"
                drawn += 1
                for i in (1, 2, 3):
                    name = f"{folder}/{label}/{drawn:04d}_{i:02d}.png"
                    written[split].append(_written(name, label, alphabet))
    kept = _write(root, written)
    return kept | {"test": [w for w in kept["test"] if w.coarse_label not in alphabets["train"]]}


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
    content = picture(name, label) if content is None else content
    return Written(name, label, coarse_label, content)


def _write(folder, splits, subfolder=""):
    """Writes the images, and in each folder a macOS file, as copies often contain."""
    for written in (w for part in splits.values() for w in part):
        path = folder / subfolder / written.name
        if not path.parent.exists():
            path.parent.mkdir(parents=True)
            path.with_name(f"._{path.name}").write_bytes(b"macOS file")
        path.write_bytes(written.content)
    return splits


def _write_lines(path, lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines))


def _struct(fields, rows):
    """Struct and cell arrays of one row, as in the official files."""
    annotations = np.empty((1, len(rows)), [(field, object) for field in fields])
    annotations[0, :] = rows
    return annotations


def _save(path, **variables):
    import scipy.io

    path.parent.mkdir(parents=True, exist_ok=True)
    scipy.io.savemat(path, variables)
