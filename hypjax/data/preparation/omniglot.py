"""Omniglot: handwritten characters (Lake et al., 2015)."""

import re

from hypjax.data.preparation.official import (
    Count,
    ListedImage,
    Listing,
    OfficialBuilder,
    OfficialDataset,
    listed_image,
)
from hypjax.data.preparation.sources import Archive, FileTree, Source
from hypjax.system import console


class Omniglot(OfficialBuilder, skip_registration=True):
    """Omniglot: handwritten characters of fifty alphabets, thirty of which are for training."""

    DESCRIPTION = "Omniglot, its background alphabets for training, its evaluation ones for test."


def _list_images(tree: FileTree) -> Listing:
    """Lists images by path.

    Of the two small sets, the second is listed without the alphabets that the first also has.
    """
    folders = ("images_background", "images_evaluation")
    if any(name.split("/")[0] in folders for name in tree.files):
        train, test = (_drawings(tree, folder) for folder in folders)
        return {"train": train, "test": test}
    train, test = (_drawings(tree, f"images_background_small{i}") for i in (1, 2))
    alphabets = {drawing.superlabel for drawing in train}
    if shared := sorted(alphabets & {drawing.superlabel for drawing in test}):
        console.say(f"in both small sets, and therefore only in train: {', '.join(shared)}")
    return {"train": train, "test": [d for d in test if d.superlabel not in alphabets]}


def _drawings(tree: FileTree, folder: str) -> list[ListedImage]:
    """Lists the drawings of a folder; the class is the character, its group the alphabet."""
    pattern = re.compile(rf"{folder}/(([^/]+)/[^/]+)/[^/]+\.png")
    matches = (match for name in sorted(tree.files) if (match := pattern.fullmatch(name)))
    return [listed_image(tree, m[0], label=m[1], superlabel=m[2]) for m in matches]


# Addresses and checksums as in tensorflow_datasets.
_URL = "https://github.com/brendenlake/omniglot/raw/master/python"

DATASET = OfficialDataset(
    builder=Omniglot,
    counts={"train": Count(19280, 964), "test": Count(13180, 659)},
    source=Source(
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
        required="images_background.zip and images_evaluation.zip",
        origin="https://github.com/brendenlake/omniglot/tree/master/python",
    ),
    list_images=_list_images,
)
