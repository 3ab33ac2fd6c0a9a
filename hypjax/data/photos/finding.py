"""Images to embed, in any form that a command accepts."""

import glob
import os
import pathlib

from hypjax.data.photos import tables
from hypjax.data.photos.folders import list_tree
from hypjax.data.photos.photo import Photo
from hypjax.errors import UserError, require_utf8


def find_photos(where: str) -> list[Photo]:
    """Finds images to embed; their classes may be unknown.

    Args:
        where: One of
            a folder, which is searched at any depth (its sub-folders, if any, are classes as for
            `folders.list_folder`);
            a .csv or .parquet table, see `tables.read_table`;
            a .txt file with one path per line, relative to the file's folder;
            a pattern such as 'photos/*.jpg';
            one image.

    Returns:
        The images without duplicates, by absolute path; the label is '' if the class is unknown.

    Raises:
        UserError: If there are no images, or the name of a file is not UTF-8, which the formats of
            galleries cannot hold.
    """
    path = pathlib.Path(where).expanduser()
    if path.is_dir():
        photos = list_tree(path)
    elif path.suffix.lower() in tables.SUFFIXES:
        photos = tables.read_table(path)
    elif path.suffix.lower() == ".txt":
        photos = [Photo(path.parent / line, "") for line in _read_lines(path)]
    elif path.is_file():
        photos = [Photo(path, "")]
    else:
        found = sorted(glob.glob(str(path), recursive=True))
        photos = [Photo(pathlib.Path(name), "") for name in found if pathlib.Path(name).is_file()]
    if not photos:
        raise UserError(f"no images at {where}")
    unique = {os.path.realpath(photo.path): photo for photo in reversed(photos)}
    found = [photo._replace(path=photo.path.absolute()) for photo in reversed(unique.values())]
    require_utf8([str(photo.path) for photo in found])
    return found


def _read_lines(path: pathlib.Path) -> list[str]:
    """Reads the non-empty lines of a text file."""
    try:
        lines = path.read_text("utf-8-sig").replace("\0", "").split("\n")
        return [line.strip() for line in lines if line.strip()]
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"cannot read {path}: save it as UTF-8") from error
