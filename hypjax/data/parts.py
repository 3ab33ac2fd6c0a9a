"""The parts of a dataset: training, validation and test images, and the searches to be scored."""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from hypjax.data.dataset import Dataset, stacked
from hypjax.errors import UserError
from hypjax.system import console
from hypjax.types import Judgements

FEW_CLASSES = 8  # Of fewer training classes, a share for validation holds out none.
_LEAST = 4  # Images of a class that are split: two to train on, and two that can find each other.
_HELD_OUT = 0.25  # Share of a class's images to test on.
Images = TypeVar("Images")
_Halves = tuple[Dataset, Dataset | None]  # The remaining and the held-out images, if any.


@dataclasses.dataclass(frozen=True)
class HeldOutClasses:
    """Numbers or shares of classes to hold out of a dataset's training classes; see `hold_out`."""

    test: float  # If the dataset has no test part.
    validation: float  # If it has no validation part.
    seed: int
    images: bool = False  # Hold out images of all classes instead, see `hold_out_images`.


NOTHING_HELD_OUT = HeldOutClasses(0, 0, 0)


class Task(NamedTuple, Generic[Images]):
    """A search among datasets or embeddings that is to be scored."""

    queries: Images
    gallery: Images | None = None  # If None, the queries search each other.
    judgements: Judgements | None = None  # If None, a query should find the images of its class.

    @property
    def items(self) -> int:
        """Number of images that a query can find."""
        return len(self.queries) - 1 if self.gallery is None else len(self.gallery)


class Splits(NamedTuple):
    """The parts of a dataset."""

    train: Dataset | None  # None if models can only be scored.
    validation: Dataset | None  # Held-out training classes, if any, for choosing a model.
    test: Dataset  # Images to report on, never to choose by.
    gallery: Dataset | None  # What the test images search, if not each other.
    fingerprint: str  # Hash that differs if any image of the dataset differs.
    notes: tuple[str, ...] = ()  # Remarks that accompany every result computed from the dataset.
    judgements: Judgements | None = None  # What each test image should find, if not its class.
    name: str = ""  # Under which scores by judgements are listed.
    benchmarks: Mapping[str, Task] = MappingProxyType({})  # Further judged datasets, by name.
    further_fingerprints: Mapping[str, str] = MappingProxyType({})  # Of these.

    def training_images(self) -> Dataset:
        """The images to learn from; raises UserError if there are none."""
        if self.train is None:
            raise UserError(
                f"{self.name} has no training images; evaluate on it with --mode=evaluate, or name "
                "another dataset in data.name and this one in eval.benchmarks"
            )
        return self.train

    def images(self, *, scored: bool = False) -> Dataset:
        """All images as one table, or those of the test.

        Images of a judged part, which are of one class by name, have no class.
        """
        parts = {"test": self.test}
        if self.gallery is not None:
            parts = {"query": self.test, "gallery": self.gallery}
        if not scored:
            parts = {"train": self.train, "validation": self.validation, **parts}
        tables = []
        for name, part in parts.items():
            if part is None:
                continue
            if self.judgements is not None and part.num_classes == 1:
                part = dataclasses.replace(part, class_names=np.full(len(part), "", object))
            facts = [f"{self.fingerprint} {name} {i}" for i in part.positions]
            facts, names = np.array(facts, object), np.full(len(part), name, object)
            tables.append(dataclasses.replace(part, facts=facts, splits=names))
        return stacked(tables)

    @property
    def task(self) -> Task:
        """The search of the test images."""
        return Task(self.test, self.gallery, self.judgements)

    @property
    def tasks(self) -> dict[str, Task]:
        """All searches to report on, by the dataset's name."""
        return {self.name: self.task, **self.benchmarks}


def hold_out(dataset: Dataset, amount: float, seed: int, name: str) -> _Halves:
    """Holds out random classes of a dataset; returns the remaining and the held-out images, if any.

    The amount is a number of classes or, below 1, their share, but at least two classes. The seed
    is not the run's seed, so that runs with different seeds are compared on the same classes. The
    name of the held-out part, test or validation, is for messages. Raises UserError if fewer than
    two classes would remain.
    """
    if amount == 0:
        return dataset.renumbered(), None
    classes = np.unique(dataset.labels)
    count = int(amount) if amount >= 1 else max(2, round(amount * len(classes)))
    if count > len(classes) - 2:
        raise UserError(
            f"config.data.{name}_classes is {amount:g}, {count} of {len(classes)} classes, but two "
            f"must remain to train on, and two are needed to search; lower it, or add classes"
        )
    shuffled = np.random.default_rng(seed).permutation(classes)
    return dataset.with_classes(shuffled[count:]), dataset.with_classes(shuffled[:count])


def hold_out_images(dataset: Dataset, seed: int) -> tuple[Dataset, Dataset]:
    """Holds out a quarter of the images of each class, at random, but at least two.

    Returns the remaining and the held-out images. Classes with fewer than four images are only
    trained on; if fewer than two classes have as many, raises UserError.
    """
    draw, chosen = np.random.default_rng(seed), []
    for label in np.unique(dataset.labels):
        own = draw.permutation(np.flatnonzero(dataset.labels == label))
        count = max(2, round(_HELD_OUT * len(own)))
        chosen.append(own[: count if len(own) >= _LEAST else 0])
    small = sum(len(own) == 0 for own in chosen)
    if len(chosen) - small < 2:
        raise UserError(
            f"config.data.split is images, which holds out images of classes with {_LEAST} or "
            f"more, but there are {len(chosen) - small} such classes; add images"
        )
    if small:
        console.say(f"{small} classes with fewer than {_LEAST} images are only trained on")
    held_out = np.sort(np.concatenate(chosen))
    rest = np.setdiff1d(np.arange(len(dataset)), held_out)
    return dataset.take(rest).renumbered(), dataset.take(held_out)


def hold_out_validation(dataset: Dataset, held_out: HeldOutClasses) -> _Halves:
    """Holds out validation classes as `hold_out` does; a share of few classes holds out none."""
    amount, classes = held_out.validation, dataset.num_classes
    if 0 < amount < 1 and classes < FEW_CLASSES:
        console.say(f"no class is held out for validation: there are only {classes} to train on")
        amount = 0
    return hold_out(dataset, amount, held_out.seed, "validation")


def check_classes(name: str, splits: Splits) -> None:
    """Checks that parts can be trained on and searched, and warns of classes with one image.

    Raises UserError if a part has fewer than two classes, or no query has an image to find.
    """
    train, judged = splits.train, splits.judgements is not None
    test = None if judged else splits.test
    parts = {"train": train, "validation": splits.validation, "test": test}
    for part, images in parts.items():
        if images is not None and images.num_classes < 2:
            raise UserError(
                f"the {part} part of {name} has {images.num_classes} class; it needs two or more"
            )
    for part, gallery in (("validation", None), ("test", splits.gallery)):
        if (queries := parts[part]) is None:
            continue
        if gallery is None:
            match = np.bincount(queries.labels).max() > 1
        else:
            match = np.isin(queries.labels, gallery.labels).any()
        if not match:
            raise UserError(f"no image in the {part} part of {name} has an image to find")
    if judged and not any(map(len, [*splits.judgements.easy, *splits.judgements.hard])):
        raise UserError(f"no query of {name} has an image to find in this copy")
    single = 0 if train is None else int(np.sum(np.bincount(train.labels) == 1))
    if single:
        console.warn(
            f"{single} of {train.num_classes} training classes have one image, "
            "which is compared with itself"
        )
