"""The parts of a dataset: training, validation and test images, and the searches to be scored."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from hypjax.data.dataset import Dataset, stacked
from hypjax.errors import UserError, counted
from hypjax.retrieval.own_images import OwnRows
from hypjax.system import console
from hypjax.types import GroundTruth

_FEW_CLASSES = 8  # With fewer training classes, a share for validation holds out none.
_TOO_FEW_CLASSES = 5  # With fewer, what the head learns rarely transfers to new classes.
_LEAST = 4  # Images of a class that is split: two to train on, and two that can find each other.
_LEAST_VALIDATED = 8  # Training images of a class from which some are held out to validate.
_SHARE = " --config.data.validation_classes=0.1"  # Of a message.
_HELD_OUT = 0.25  # Share of a class's images to test on.
SAME_CLASSES = "tested on other images of the classes that were trained on (data.split=images)"
Images = TypeVar("Images")
_Halves = tuple[Dataset, Dataset]  # The remaining and the held-out images.


@dataclasses.dataclass(frozen=True)
class HeldOutClasses:
    """How many training classes to hold out, as numbers or shares."""

    test: float = 0  # If the dataset has no test part.
    validation: float = 0  # If it has no validation part.
    seed: int = 0
    by_image: bool = False  # Hold out images of all classes instead.


class Task(NamedTuple, Generic[Images]):
    """A search among datasets or embeddings that is to be scored."""

    queries: Images
    gallery: Images | None = None  # If None, the queries search each other.
    ground_truth: GroundTruth | None = None  # If None, a query should find the images of its class.
    own_rows: OwnRows = ()  # Rows that each query does not find, see `retrieval.own_images`.

    @property
    def num_items(self) -> int:
        """Number of images that a query can find."""
        if self.gallery is None:
            return len(self.queries) - max(map(len, self.own_rows), default=1)
        return len(self.gallery) - max(map(len, self.own_rows), default=0)


class Splits(NamedTuple):
    """The parts of a dataset."""

    train: Dataset | None  # None if models can only be scored.
    validation: Dataset | None  # Held-out training classes or images, if any, to choose a model.
    test: Dataset  # Images to report on, never to choose by.
    gallery: Dataset | None  # What the test images search, if not each other.
    fingerprint: str  # Hash that differs if any image of the dataset differs.
    notes: tuple[str, ...] = ()  # Remarks that accompany every result computed from the dataset.
    ground_truth: GroundTruth | None = None  # What each test image should find, if not its class.
    name: str = ""  # Under which scores by ground truth are listed.
    benchmarks: Sequence["Splits"] = ()  # Further datasets with ground truth.
    own_rows: OwnRows = ()  # See `Task`.
    repeats: tuple[str, ...] = ()  # Remarks on images that occur more than once.
    no_validation: str = ""  # Why no training images are held out for validation, and the remedy.

    def training_images(self) -> Dataset:
        """The images to learn from; raises UserError if there are none."""
        if self.train is None:
            raise UserError(
                f"{self.name} has no training images; use --mode=evaluate, or name another dataset "
                "in data.name and this one in eval.benchmarks"
            )
        return self.train

    def images(self, *, scored: bool = False) -> Dataset:
        """All images, or only the test's (`scored`), without classes if they have ground truth."""
        parts = {"test": self.test}
        if self.gallery is not None:
            parts = {"query": self.test, "gallery": self.gallery}
        if not scored:
            parts = {"train": self.train, "validation": self.validation, **parts}
        tables = []
        for name, part in parts.items():
            if part is None:
                continue
            if self.ground_truth is not None and part.num_classes == 1:
                part = dataclasses.replace(part, class_names=np.full(len(part), "", object))
            versions = [f"{self.fingerprint} {name} {i}" for i in part.positions]
            versions, names = np.array(versions, object), np.full(len(part), name, object)
            tables.append(dataclasses.replace(part, file_versions=versions, splits=names))
        return stacked(tables)

    @property
    def task(self) -> Task:
        """The search of the test images."""
        return Task(self.test, self.gallery, self.ground_truth, self.own_rows)

    @property
    def tasks(self) -> dict[str, Task]:
        """All searches to report on, by the dataset's name."""
        return {splits.name: splits.task for splits in (self, *self.benchmarks)}

    @property
    def fingerprints(self) -> dict[str, str]:
        """Hashes of the images of this dataset and of its benchmarks."""
        further = {f"images of {splits.name}": splits.fingerprint for splits in self.benchmarks}
        return {"images": self.fingerprint, **further}


def divide(
    where: str, parts: Mapping[str, Dataset], held_out: HeldOutClasses, **fields: Any
) -> Splits:
    """Assigns the parts of a dataset to `Splits`; `fields` are its other fields.

    Without a test or validation part, classes or images are held out of `train`.
    """
    train, validation = parts.get("train"), parts.get("validation")
    test, gallery = parts.get("test"), None
    if {"query", "gallery"} <= parts.keys():
        test, gallery = parts["query"], parts["gallery"]
    undivided, reason = None, ""
    if held_out.by_image:
        if test is not None:
            raise UserError(f"{where} has splits already; leave out --config.data.split=images")
        train, validation, test, reason = _split_images(where, train, held_out)
    else:
        if test is None:
            undivided = train
            train, test = _hold_out_test(where, train, held_out)
        if train is not None:
            train = train.renumbered()
            if validation is None:
                train, validation, reason = _hold_out_validation(train, undivided, held_out)
    few = train is not None and train.num_classes < _TOO_FEW_CLASSES
    if few and (others := {*test.class_names} - {*train.class_names}):
        unvalidated = ", and none is held out for validation" * bool(reason and held_out.validation)
        by_image = [] if undivided is None else _by_image(undivided, held_out)
        console.warn(
            f"{train.num_classes} classes are too few to learn what tells apart the "
            f"{len(others)} others of the test, so the model may end below the untrained one"
            f"{unvalidated}; {' or '.join(['add classes', *by_image])}"
        )
    elif reason and held_out.validation:
        console.say(reason)
    return Splits(train, validation, test, gallery, no_validation=reason, **fields)


def _hold_out_test(where: str, images: Dataset, held_out: HeldOutClasses) -> _Halves:
    """Holds out test classes."""
    if images.num_classes >= 4 and held_out.test:
        return _hold_out(images, held_out.test, held_out.seed, "test")
    amount, rest = held_out.validation, images.num_classes - max(2, round(images.num_classes / 4))
    unfit = amount >= 1 and not 2 <= amount <= rest - 2
    remedies = ["set --config.data.test_classes=0.25" + _SHARE * unfit]
    if images.num_classes < 4:
        remedies = ["add classes (four are needed: two to train on, and two others to test on)"]
    only = f" ({images.class_name(0)})" if images.num_classes == 1 else ""
    for remedy in _by_image(images, held_out):
        remedies.append(f"{remedy}, which tests on other images of the same classes")
    raise UserError(
        f"{where} has {counted(images.num_classes, 'class')}{only} and no test images; "
        + ", or ".join(remedies)
    )


def _hold_out_validation(
    train: Dataset, undivided: Dataset | None, held_out: HeldOutClasses
) -> tuple[Dataset, Dataset | None, str]:
    """Training images, validation classes if any, and why there are none, with the remedy."""
    amount, count = held_out.validation, train.num_classes
    remedies = ["set --config.data.validation_classes=2"] if count >= 4 else []
    remedies += [] if undivided is None else _by_image(undivided, held_out, validated=True)
    fallback = "add a split named validation" if undivided is None else "add classes"
    remedy = " or ".join(remedies or [fallback])
    if amount == 0 or (amount < 1 and count < _FEW_CLASSES):
        why = f"there are only {count} to train on"
        why = why if amount else "config.data.validation_classes is 0"
        return train, None, f"no class is held out for validation: {why}; {remedy}"
    return *_hold_out(train, amount, held_out.seed, "validation", remedy), ""


def _hold_out(images: Dataset, amount: float, seed: int, part: str, remedy: str = "") -> _Halves:
    """Holds out a number of random classes or, below 1, a share of them, but at least two."""
    # The seed is not the run's: runs with different seeds are compared on the same classes.
    classes = np.unique(images.labels)
    count = int(amount) if amount >= 1 else max(2, round(amount * len(classes)))
    most = len(classes) - 2
    if not 2 <= count <= most:
        valid = f"set it to 0, or {remedy}" if most < 2 else f"set it to 2 to {most}"
        raise UserError(
            f"config.data.{part}_classes is {amount:g}, {count} of {len(classes)} classes, but two "
            "must remain to train on, and two are needed to search; "
            f"{'set it to 2' if most == 2 else valid}"
        )
    shuffled = np.random.default_rng(seed).permutation(classes)
    return images.with_classes(shuffled[count:]), images.with_classes(shuffled[:count])


def _by_image(images: Dataset, held_out: HeldOutClasses, *, validated: bool = False) -> list[str]:
    """The advice to hold out images of each class; [] if there are too few for that."""
    counts, least, amount = np.bincount(images.labels), _LEAST, held_out.validation
    if validated:
        counts, least = counts - np.maximum(2, np.round(_HELD_OUT * counts)), _LEAST_VALIDATED
    if np.sum(counts >= least) < 2:
        return []
    unfit = amount >= 1 or validated and not amount  # With data.split=images, it is a share.
    return ["set --config.data.split=images" + _SHARE * bool(unfit)]


def _split_images(
    where: str, images: Dataset, held_out: HeldOutClasses
) -> tuple[Dataset, Dataset | None, Dataset, str]:
    """Training, validation and test images of the same classes, and why no image is validated."""
    draw = np.random.default_rng(held_out.seed)
    train, test = _hold_out_images(images, _HELD_OUT, _LEAST, draw)
    if test.num_classes < 2:
        raise UserError(
            f"{where} has {counted(test.num_classes, 'class')} with {_LEAST} or more images, and "
            "data.split=images needs two; add images"
        )
    if small := images.num_classes - test.num_classes:
        console.say(f"classes with fewer than {_LEAST} images: {small}, only trained on")
    rest, validation = _hold_out_images(train, held_out.validation, _LEAST_VALIDATED, draw)
    reason = ""
    if validation.num_classes < 2:
        reason = f"fewer than two classes have {_LEAST_VALIDATED} to train on; add images"
    elif not held_out.validation:
        reason = "config.data.validation_classes is 0; set --config.data.validation_classes=0.1"
    if reason:
        rest, validation, reason = train, None, f"no image is held out for validation: {reason}"
    return rest.renumbered(), validation, test, reason


def _hold_out_images(
    images: Dataset, share: float, least: int, draw: np.random.Generator
) -> _Halves:
    """Holds out a share, but at least two, of the images of each class with `least` or more."""
    chosen = []
    for label in np.unique(images.labels):
        members = draw.permutation(np.flatnonzero(images.labels == label))
        count = max(2, round(share * len(members)))
        chosen.append(members[: count if len(members) >= least else 0])
    held_out = np.sort(np.concatenate(chosen))
    rest = np.setdiff1d(np.arange(len(images)), held_out)
    return images.take(rest), images.take(held_out)


def check_classes(name: str, splits: Splits) -> None:
    """Rejects parts that cannot be trained on or searched."""
    parts = {"train": splits.train, "validation": splits.validation}
    if splits.ground_truth is None:
        parts["test"] = splits.test
    elif not any(map(len, [*splits.ground_truth.easy, *splits.ground_truth.hard])):
        raise UserError(f"no query of {name} has an image to find in this copy")
    for part, images in parts.items():
        if images is None:
            continue
        if images.num_classes < 2:
            classes = counted(images.num_classes, "class")
            raise UserError(f"the {part} part of {name} has {classes}; it needs two or more")
        if part == "test" and splits.gallery is not None:
            can_match = np.isin(images.labels, splits.gallery.labels).any()
            problem = f"no query of {name} has an image of its class in the gallery"
        else:
            can_match = part == "train" or np.bincount(images.labels).max() > 1
            problem = f"each class in the {part} part of {name} has one image, so none can be found"
        if not can_match:
            raise UserError(f"{problem}; add images")
