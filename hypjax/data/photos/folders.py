"""Images in folders."""

import os
import pathlib

from hypjax.data.photos.photo import SPLITS, Photo
from hypjax.errors import UserError

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff"})


def list_folder(root: pathlib.Path) -> list[Photo]:
    """Lists the images of a folder whose sub-folders are classes, or splits with class folders.

    The sub-folders are splits if one is named `train` and has sub-folders itself; all must then
    have names from `SPLITS`. Files at any depth below a class belong to it. Hidden files and files
    without an image suffix are ignored.

    Raises:
        UserError: If there are no sub-folders, or no images in them.
    """
    folders = _subfolders(root)
    if not folders:
        raise UserError(f"{root} has no sub-folders; put the images of each class into one")
    names = {folder.name for folder in folders}
    if "train" in names and _subfolders(root / "train"):
        if others := names - set(SPLITS):
            raise UserError(
                f"{root} has {', '.join(sorted(others))} next to train, which holds classes; "
                f"splits must be named {', '.join(SPLITS)}"
            )
        classes = [(folder, split.name) for split in folders for folder in _subfolders(split)]
    else:
        classes = [(folder, None) for folder in folders]
    photos = [
        Photo(path, folder.name, split)
        for folder, split in classes
        for path in _image_files(folder)
    ]
    if not photos:
        raise UserError(f"no images in the sub-folders of {root} ({', '.join(sorted(SUFFIXES))})")
    return photos


def list_tree(root: pathlib.Path) -> list[Photo]:
    """Lists all images below a folder.

    The label is the class folder, as for `list_folder`, or '' for images outside any.
    """
    names = {folder.name for folder in _subfolders(root)}
    has_splits = "train" in names and names <= set(SPLITS) and bool(_subfolders(root / "train"))
    photos = []
    for path in _image_files(root):
        folders = path.relative_to(root).parts[has_splits:-1]
        photos.append(Photo(path, folders[0] if folders else ""))
    return photos


def _subfolders(folder: pathlib.Path) -> list[pathlib.Path]:
    try:
        return sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))
    except OSError as error:
        raise UserError(f"cannot read the folder {folder}: {error.strerror}") from error


def _image_files(folder: pathlib.Path) -> list[pathlib.Path]:
    """Finds visible files with an image suffix at any depth; follows links."""
    found, visited = [], set()
    for parent, folders, names in os.walk(folder, followlinks=True, onerror=_raise_user_error):
        real = os.path.realpath(parent)
        if real in visited:  # Reached by a link to a parent folder.
            folders.clear()
            continue
        visited.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        paths = (pathlib.Path(parent, name) for name in names if not name.startswith("."))
        found += [path for path in paths if path.suffix.lower() in SUFFIXES]
    return sorted(found)


def _raise_user_error(error: OSError) -> None:
    raise UserError(f"cannot read the folder {error.filename}: {error.strerror}") from error
