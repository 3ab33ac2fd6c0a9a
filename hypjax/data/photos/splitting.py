"""Opens users' own images as training, validation and test parts."""

import os
import pathlib
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from hypjax.data.dataset import Dataset, Decoding, fill_cache, with_host_cache
from hypjax.data.parts import (
    HeldOutClasses,
    Splits,
    check_classes,
    hold_out,
    hold_out_images,
    hold_out_validation,
)
from hypjax.data.photos import tables
from hypjax.data.photos.folders import list_folder
from hypjax.data.photos.measuring import hash_facts, measure
from hypjax.data.photos.photo import SPLITS, Files, Photo
from hypjax.errors import UserError
from hypjax.system import console

_FEW = 5  # Of fewer training classes, little holds for others.
_SAME_CLASSES = "tested on other images of the classes that were trained on (data.split=images)"


def open_photos(path: pathlib.Path, decoding: Decoding, held_out: HeldOutClasses) -> Splits:
    """Opens the images of a folder or a table.

    A folder has one sub-folder per class, or `train` and `test` with such sub-folders; see
    `folders.list_folder` and `tables.read_table`. Every image is decoded once to check that it is
    readable, unless that was done before and no file has changed.

    Args:
        path: The folder or table.
        decoding: How images are decoded and cached.
        held_out: Classes to hold out if the images are not split already.

    Raises:
        UserError: If there is no such folder or table, an image cannot be read, or there are too
            few classes or images to train or to search.
    """
    if path.is_dir():
        photos = list_folder(path)
    elif path.suffix.lower() in tables.SUFFIXES:
        photos = tables.read_table(path)
    else:
        raise UserError(
            f"config.data.path is {path}, which is neither a folder nor a .csv or .parquet table"
        )
    measured = measure(photos)
    root = (path if path.is_dir() else path.parent).absolute()
    facts = (
        (os.path.relpath(photo.path.absolute(), root), *photo[1:4], *row)
        for photo, row in zip(photos, measured.tolist(), strict=True)
    )
    fingerprint = hash_facts(facts)
    everything = _dataset(photos, measured[:, :2].astype(np.int32), decoding.fast)
    everything = with_host_cache(everything, fingerprint, decoding)
    notes = (_SAME_CLASSES,) if held_out.images else ()
    if photos[0].split is not None:
        parts = _given_splits(path, photos, everything, held_out)
    elif held_out.images:
        train, test = hold_out_images(everything, held_out.seed)
        parts = train, None, test, None
    else:
        parts = _split_classes(path, everything, held_out)
    splits = Splits(*parts, fingerprint, notes)
    check_classes(str(path), splits)
    fill_cache(everything, decoding.channels)
    return splits


def _dataset(photos: Sequence[Photo], sizes: Int[np.ndarray, "photos 2"], fast: bool) -> Dataset:
    superlabels, group_names = _groups(photos)
    return Dataset(
        records=Files([photo.path for photo in photos]),
        positions=np.arange(len(photos)),
        labels=np.unique([photo.label for photo in photos], return_inverse=True)[1],
        sizes=sizes,
        names=[str(photo.path) for photo in photos],
        superlabels=superlabels,
        class_names=[photo.label for photo in photos],
        group_names=group_names,
        upright=True,
        fast=fast,
    )


def _groups(
    photos: Sequence[Photo],
) -> tuple[Int[np.ndarray, " photos"] | None, Sequence[str] | None]:
    """Number of each photo's group, and the names of the groups; None if there are none."""
    if all(photo.superlabel is None for photo in photos):
        return None, None
    names, numbers = np.unique([photo.superlabel or "" for photo in photos], return_inverse=True)
    return numbers, names


def _split_classes(
    path: pathlib.Path, everything: Dataset, held_out: HeldOutClasses
) -> tuple[Dataset, Dataset | None, Dataset, None]:
    """Holds out random classes; returns train, validation, test and no gallery."""
    if 2 <= everything.num_classes < 4:
        raise UserError(
            f"{path} has {everything.num_classes} classes, too few to train on two and to test on "
            "two others; add classes, put back those that a run was trained on, or set "
            "--config.data.split=images, which tests on other images of the same classes"
        )
    rest, test = hold_out(everything, held_out.test, held_out.seed, "test")
    if test is None:
        raise UserError(
            f"{path} has no splits; set --config.data.test_classes=0.25, or "
            "--config.data.split=images to test on other images of the same classes"
        )
    train, validation = hold_out_validation(rest, held_out)
    if train.num_classes < _FEW:
        console.warn(
            f"{train.num_classes} classes are too few to learn what tells apart the "
            f"{test.num_classes} others of the test, so the model may end below the untrained one; "
            "set --config.data.split=images to test on other images of the same classes, or add "
            "classes"
        )
    return train, validation, test, None


def _given_splits(
    path: pathlib.Path, photos: Sequence[Photo], everything: Dataset, held_out: HeldOutClasses
) -> tuple[Dataset, Dataset | None, Dataset, Dataset | None]:
    """Splits the images as they are labelled; returns train, validation, test and gallery."""
    if held_out.images:
        raise UserError(f"{path} has splits already; leave out --config.data.split=images")
    split_names = np.array([photo.split for photo in photos])
    parts = {
        name: everything.take(np.flatnonzero(split_names == name))
        for name in SPLITS
        if name in split_names
    }
    _check_split_names(path, set(parts))
    train, validation = parts["train"].renumbered(), parts.get("validation")
    if validation is None:
        train, validation = hold_out_validation(train, held_out)
    _check_overlap(path, photos)
    return train, validation, parts.get("test", parts.get("query")), parts.get("gallery")


def _check_split_names(path: pathlib.Path, names: set[str]) -> None:
    tests = names - {"train", "validation"}
    if "train" not in names or tests not in ({"test"}, {"query", "gallery"}):
        raise UserError(
            f"{path} has the splits {', '.join(sorted(names))}; "
            "it needs train, and either test or both query and gallery"
        )


def _check_overlap(path: pathlib.Path, photos: Sequence[Photo]) -> None:
    """Rejects classes shared by validation and test, and warns of classes shared with train."""
    classes = {split: {p.label for p in photos if p.split == split} for split in SPLITS}
    test = classes["test"] | classes["query"] | classes["gallery"]
    if shared := classes["validation"] & test:
        raise UserError(
            f"{path} has {len(shared)} classes in both validation and test, such as {min(shared)}; "
            "the best model would be chosen on what it is tested on"
        )
    for name, others in (("validation", classes["validation"]), ("test", test)):
        if shared := classes["train"] & others:
            console.warn(
                f"{len(shared)} of the classes in {path} are in both train and {name}, "
                f"such as {min(shared)}"
            )
