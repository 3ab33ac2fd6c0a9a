"""Omniglot: handwritten characters (Lake et al., 2015)."""

import re
from collections.abc import Iterator

from hypjax.data.preparation.official import Archive, Count, Entry, FileTree, OfficialDataset


def _list_images(tree: FileTree) -> Iterator[Entry]:
    """Lists images by path; the class is the character, the coarse class the alphabet."""
    folders = {"train": "images_background", "test": "images_evaluation"}
    train_alphabets = set()  # Of the first small set; the second one repeats some.
    if not any(name.split("/")[0] in folders.values() for name in tree.files):
        folders = {"train": "images_background_small1", "test": "images_background_small2"}
        train_files = [name for name in tree.files if name.startswith(folders["train"])]
        train_alphabets = {name.split("/")[1] for name in train_files}
    for split, folder in folders.items():
        for name in sorted(tree.files):
            match = re.fullmatch(rf"{folder}/(([^/]+)/[^/]+)/[^/]+\.png", name)
            if match and not (split == "test" and match[2] in train_alphabets):
                yield Entry(split, name, class_name=match[1], coarse_label=match[2])


# Addresses and checksums as in tensorflow_datasets.
_URL = "https://github.com/brendenlake/omniglot/raw/master/python"

DATASET = OfficialDataset(
    name="omniglot",
    counts={"train": Count(19280, 964), "test": Count(13180, 659)},
    folders=("omniglot/python", "omniglot", "omniglot-py"),
    entries=("images_background", "images_evaluation", "images_background_small[12]"),
    archives=(
        Archive(
            "images_background.zip",
            unpacked="images_background/*",
            url=f"{_URL}/images_background.zip",
            sha256="ad41ab679c8b5d90b271ef46be6987cc81211774a695c29dcc5367b2b26ee640",
        ),
        Archive(
            "images_evaluation.zip",
            unpacked="images_evaluation/*",
            url=f"{_URL}/images_evaluation.zip",
            sha256="1f61a8f3366785b057fc117d9228e78a16e3d976c8953b2a10fcc74cf0609cee",
        ),
        Archive("images_background_small1.zip", "images_background_small1/*"),
        Archive("images_background_small2.zip", "images_background_small2/*"),
    ),
    source=(
        "images_background.zip and images_evaluation.zip from "
        "https://github.com/brendenlake/omniglot/tree/master/python"
    ),
    list_images=_list_images,
)
