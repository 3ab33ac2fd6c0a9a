"""Image files, and tables that list them."""

import csv
import io

import numpy as np
import pyarrow
import pyarrow.parquet
from PIL import Image

from hypjax.data.dataset import Dataset


def write_picture(path, colour=(10, 20, 30), size=(12, 10), **options):
    """Writes a picture of one colour, in the format that the file's suffix names."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path, **options)


def write_pictures(root, names):
    """Writes a picture under each name, and returns the folder."""
    for name in names:
        write_picture(root / name)
    return root


def encoded(image, kind="PNG", **options):
    """Returns the bytes of an image file."""
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def dataset_of(images, labels):
    """Returns a dataset of images, [height, width, channels], as PNG files."""
    records = [encoded(Image.fromarray(image.squeeze())) for image in images]
    sizes = np.array([image.shape[:2] for image in images], np.int32)
    return dataset_without_images(labels, records=records, sizes=sizes)


def dataset_without_images(labels, **fields):
    """Returns a dataset of labels, and of further columns."""
    numbers, labels = np.arange(len(labels)), np.array(labels)
    columns = {
        "records": (),
        "sizes": np.zeros((len(labels), 2), np.int32),
        "names": np.array([f"record {i}" for i in numbers], object),
        "class_names": np.array([f"class {label}" for label in labels], object),
    }
    return Dataset(positions=numbers, labels=labels, **columns | fields)


def write_table(path, rows):
    """Writes a .csv or .parquet file and returns its path."""
    if path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def write_squares(folder, side):
    """Writes four square photos of noise for each of twelve classes; returns the folder."""
    draw = np.random.default_rng(0)
    for name in "abcdefghijkl":
        (folder / name).mkdir()
        for i in range(4):
            pixels = draw.integers(0, 256, (side, side, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{i}.png")
    return folder
