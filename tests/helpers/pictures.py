"""Image files, and tables that list them."""

import csv
import io

import pyarrow
import pyarrow.parquet
from PIL import Image


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


def encode_png(array):
    """Returns the bytes of a PNG file with these pixels."""
    return encoded(Image.fromarray(array))


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
