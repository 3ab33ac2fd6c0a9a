"""Splits of a dataset: training, validation and test images, and the searches to be scored."""

import dataclasses
from collections.abc import Mapping, Sequence, Sized
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from hypjax.data.dataset import Dataset, stacked
from hypjax.errors import UserError, counted
from hypjax.retrieval.inputs import OwnRows
from hypjax.system import console
from hypjax.types import GroundTruth

_MIN_CLASSES_TO_HOLD_OUT = 4  # Two to hold out, and two to train on.
_MIN_CLASSES_TO_VALIDATE = 8  # With fewer, a share for validation holds out none.
_MIN_CLASSES_TO_TRAIN = 5  # With fewer, what the head learns rarely transfers to new classes.
_MIN_IMAGES_TO_TEST = 4  # Two to train on, and two that can find each other.
_MIN_IMAGES_TO_VALIDATE = 8  # Training images of a class that is split for validation.
_TEST_SHARE = 0.25  # Share of a class's images to test on.
SAME_CLASSES = "tested on other images of the classes that were trained on (data.split=images)"
UNTESTED = "trained on all images, so nothing was measured on them (data.split=none)"
NOTES = {"classes": (), "images": (SAME_CLASSES,), "none": (UNTESTED,)}  # By `data.split`.
Images = TypeVar("Images", bound=Sized)
_Halves = tuple[Dataset, Dataset]  # The remaining images, and the held-out images.


@dataclasses.dataclass(frozen=True)
class HeldOutClasses:
    """How many training classes to hold out, as numbers or shares."""

    test: float = 0  # Ignored if the dataset has test images.
    validation: float = 0  # Ignored if the dataset has validation images.
    seed: int = 0
    split: str = "classes"  # Or "images" of all classes, or "none": all images train.


class Task(NamedTuple, Generic[Images]):
    """A search among datasets or embeddings that is to be scored."""

    queries: Images
    gallery: Images | None = None  # If None, the queries search each other.
    ground_truth: GroundTruth | None = None  # If None, a query should find the images of its class.
    own_rows: OwnRows = ()  # Gallery rows of each query's own image, which scores leave out.

    @property
    def num_items(self) -> int:
        """Number of images that every query can find."""
        images, own = (self.queries, 1) if self.gallery is None else (self.gallery, 0)
        return len(images) - max(map(len, self.own_rows), default=own)


class Splits(NamedTuple):
    """A dataset by its splits."""

    train: Dataset | None  # None if models can only be scored.
    validation: Dataset | None  # Held-out training classes or images, to choose a model.
    test: Dataset  # Images to report results on, never to choose a model; empty: none.
    gallery: Dataset | None  # Images that the test images search; None: each other.
    fingerprint: str  # Hash that changes whenever an image of the dataset changes, or its name.
    notes: tuple[str, ...] = ()  # Remarks that accompany every result computed from the dataset.
    ground_truth: GroundTruth | None = None  # See `Task`.
    name: str = ""  # Name of scores by ground truth.
    benchmarks: Sequence["Splits"] = ()  # Further datasets with ground truth.
    own_rows: OwnRows = ()  # See `Task`.
    repeats: tuple[str, ...] = ()  # Remarks on images that occur more than once.
    content_fingerprint: str = ""  # For photos, such a hash without their names.
    no_validation: str = ""  # Why no training images are held out for validation, and the remedy.

    def training_images(self) -> Dataset:
        """Returns the training images; raises a UserError if there are none."""
        if self.train is None:
            advice = "name another in data.name, and this one in eval.benchmarks"
            raise UserError(f"{self.name} has no training images; use --mode=evaluate, or {advice}")
        return self.train

    def images(self, *, scored: bool = False) -> Dataset:
        """Returns all images, or only those that are scored, in a table with their splits."""
        by_split: dict[str, Dataset | None] = {"test": self.test}
        if self.gallery is not None:
            by_split = {"query": self.test, "gallery": self.gallery}
        if not scored:
            by_split = {"train": self.train, "validation": self.validation, **by_split}
        tables = []
        for split, images in by_split.items():
            if images is None or not len(images):
                continue
            images = images.whole()
            # The single class of a dataset with ground truth says nothing.
            if self.ground_truth is not None and images.num_classes == 1:
                images = dataclasses.replace(images, class_names=np.full(len(images), "", object))
            splits = np.full(len(images), split, object)
            texts = [f"{self.fingerprint} {split} {i}" for i in images.positions]
            versions = np.array(texts, object)
            tables.append(dataclasses.replace(images, splits=splits, file_versions=versions))
        return stacked(tables)

    @property
    def task(self) -> Task:
        """The search of the test images."""
        return Task(self.test, self.gallery, self.ground_truth, self.own_rows)

    @property
    def tasks(self) -> dict[str, Task]:
        """The searches of this dataset, if it is tested, and of its benchmarks, by name."""
        tested = (splits for splits in (self, *self.benchmarks) if len(splits.test))
        return {splits.name: splits.task for splits in tested}

    @property
    def provenance(self) -> dict[str, str]:
        """Hashes that tell a run's images, of which those with equal content are the same."""
        return {"images": self.fingerprint, "content": self.content_fingerprint}

    @property
    def fingerprints(self) -> dict[str, str]:
        """Hashes of the images of this dataset and of its benchmarks."""
        benchmarks = {f"images of {splits.name}": splits.fingerprint for splits in self.benchmarks}
        return {"images": self.fingerprint, **benchmarks}


def without_boxes(images: Dataset) -> Dataset:
    """Leaves out the boxes of images, and says so."""
    if images.owners is None:
        return images
    whole = images.whole()
    left_out = f"boxes of images are left out: {len(images) - len(whole)}"
    console.say(f"{left_out} (--config.train.sampling=boxes trains on them)")
    return whole


def divide(
    where: str, tables: Mapping[str, Dataset], held_out: HeldOutClasses, **fields: Any
) -> Splits:
    """Assigns tables, given by split, to `Splits`; holds missing splits out of the training images.

    `where` is the dataset's name or location, for messages; `fields` are other fields of `Splits`.
    """
    train, validation, test = (tables.get(split) for split in ("train", "validation", "test"))
    gallery = None
    if {"query", "gallery"} <= tables.keys():
        test, gallery = tables["query"], tables["gallery"]
    no_validation = ""
    advice = "add classes"
    if held_out.split == "none":
        train = tables["train"].renumbered()
        fields["no_validation"] = "all images are trained on (data.split=none)"
        return Splits(train, None, test=train.take(np.arange(0)), gallery=None, **fields)
    if held_out.split == "images":
        if test is not None:
            raise UserError(f"{where} has splits already; leave out --config.data.split=images")
        train, validation, test, no_validation = _split_images(where, tables["train"], held_out)
    elif test is None:
        train, test = _hold_out_test(where, tables["train"], held_out)
        advice = "add classes, or set --config.data.split=images"
    if train is not None:
        train = train.renumbered()
        if validation is None and held_out.split == "classes":
            train, validation, no_validation = _hold_out_validation(train, held_out)
        unseen = {*test.class_names} - {*train.class_names}
        too_few = unseen and train.num_classes < _MIN_CLASSES_TO_TRAIN
        if no_validation and held_out.validation and not too_few:
            console.say(no_validation)
        if too_few:
            problem = f"{train.num_classes} classes are too few to learn what tells others apart"
            console.warn(f"{problem}; {advice}")
    return Splits(train, validation, test, gallery, no_validation=no_validation, **fields)


def _hold_out_test(where: str, images: Dataset, held_out: HeldOutClasses) -> _Halves:
    """Returns training and test images of different classes."""
    can_test = images.num_classes >= _MIN_CLASSES_TO_HOLD_OUT
    if can_test and held_out.test:
        return _hold_out_classes(images, held_out.test, held_out.seed, "test_classes")
    classes = f"{where} has {counted(images.num_classes, 'class')}"
    advice = "set --config.data.test_classes=0.25" if can_test else "add classes (four are needed)"
    raise UserError(f"{classes} and no test images; {advice}, or set --config.data.split=images")


def _hold_out_validation(
    train: Dataset, held_out: HeldOutClasses
) -> tuple[Dataset, Dataset | None, str]:
    """Returns training images, and validation images or else why there are none."""
    amount, count = held_out.validation, train.num_classes
    if amount >= 1 or (amount > 0 and count >= _MIN_CLASSES_TO_VALIDATE):
        train, validation = _hold_out_classes(train, amount, held_out.seed, "validation_classes")
        return train, validation, ""
    cause = f"there are only {count} to train on" if amount else "data.validation_classes is 0"
    can_validate = count >= _MIN_CLASSES_TO_HOLD_OUT
    remedy = "set --config.data.validation_classes=2" if can_validate else "add classes"
    return train, None, f"no class is held out for validation: {cause}; {remedy}"


def _hold_out_classes(images: Dataset, amount: float, seed: int, field: str) -> _Halves:
    """Holds out random classes: a number or, below 1, a share of them, but at least two."""
    # The seed is not the run's: runs with different seeds are compared on the same classes.
    classes = np.unique(images.labels)
    count = int(amount) if amount >= 1 else max(2, round(amount * len(classes)))
    max_count = len(classes) - 2
    if not 2 <= count <= max_count:
        setting = f"config.data.{field} is {amount:g}, {count} of {len(classes)} classes"
        valid = "0" if max_count < 2 else "2" if max_count == 2 else f"2 to {max_count}"
        raise UserError(f"{setting}, but both parts need two; set it to {valid}")
    shuffled = np.random.default_rng(seed).permutation(classes)
    return images.with_classes(shuffled[count:]), images.with_classes(shuffled[:count])


def _split_images(
    where: str, images: Dataset, held_out: HeldOutClasses
) -> tuple[Dataset, Dataset | None, Dataset, str]:
    """Splits each class's images into train, validation and test; says why validation is None."""
    rng = np.random.default_rng(held_out.seed)
    train, test = _hold_out_images(images, _TEST_SHARE, _MIN_IMAGES_TO_TEST, rng)
    if test.num_classes < 2:
        classes = f"{counted(test.num_classes, 'class')} with {_MIN_IMAGES_TO_TEST} or more images"
        advice = "add images, or search them without training (hypjax.embed --encoder=lite)"
        raise UserError(f"{where} has {classes}, and data.split=images needs two; {advice}")
    if small := images.num_classes - test.num_classes:
        kind = f"classes with fewer than {_MIN_IMAGES_TO_TEST} images"
        console.say(f"{kind}: {small}, only trained on")
    share = held_out.validation or 0.1  # Without a share, the message says whether 0.1 would do.
    rest, validation = _hold_out_images(train, share, _MIN_IMAGES_TO_VALIDATE, rng)
    if validation.num_classes < 2:
        cause = f"fewer than two classes have {_MIN_IMAGES_TO_VALIDATE} to train on; add images"
    elif held_out.validation:
        return rest, validation, test, ""
    else:
        cause = "config.data.validation_classes is 0; set --config.data.validation_classes=0.1"
    return train, None, test, f"no image is held out for validation: {cause}"


def _hold_out_images(
    images: Dataset, share: float, min_images: int, rng: np.random.Generator
) -> _Halves:
    """Holds out a share, but at least two, of the images of classes with `min_images` or more."""
    chosen = []
    for label in np.unique(images.labels):
        rows = rng.permutation(np.flatnonzero(images.labels == label))
        count = max(2, round(share * len(rows))) if len(rows) >= min_images else 0
        chosen.append(rows[:count])
    held_out = np.sort(np.concatenate(chosen))
    remaining = np.setdiff1d(np.arange(len(images)), held_out)
    return images.take(remaining), images.take(held_out)


def check_classes(name: str, splits: Splits) -> None:
    """Rejects training images of one class, and validation and test images that find nothing."""
    tables = {"train": splits.train, "validation": splits.validation}
    if splits.ground_truth is None:
        tables["test"] = None if UNTESTED in splits.notes else splits.test
    elif not any(map(len, [*splits.ground_truth.easy, *splits.ground_truth.hard])):
        raise UserError(f"no query of {name} has an image to find in this copy")
    for split, images in tables.items():
        if images is None:
            continue
        if images.num_classes < 2:
            classes = counted(images.num_classes, "class")
            raise UserError(f"the {split} part of {name} has {classes}; it needs two or more")
        if split == "test" and splits.gallery is not None:
            can_match = bool(np.isin(images.labels, splits.gallery.labels).any())
            problem = f"no query of {name} has an image of its class in the gallery"
        else:
            can_match = (
                split == "train"
                or images.captions is not None
                or np.bincount(images.labels).max() > 1
            )
            problem = (
                f"each class in the {split} part of {name} has one image, so none can be found"
            )
        if not can_match:
            raise UserError(f"{problem}; add images")
