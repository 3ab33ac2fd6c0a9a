"""Datasets on disk: records by position, beside an index of what plans need to know of them."""

import contextlib
import dataclasses
import hashlib
import io
import os
import pathlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow_datasets as tfds
from jaxtyping import Int
from ml_collections import ConfigDict
from PIL import Image

from hypjax.config import DATASETS, nearest
from hypjax.data import pixels
from hypjax.data.glyphs import Glyphs
from hypjax.errors import UserError

BUILDERS = {"glyphs": Glyphs}


@dataclasses.dataclass(frozen=True, eq=False)
class Dataset:
    """Some records of one split, in a fixed order.

    Attributes:
        records: Random access to the split's records; `image` holds the encoded bytes.
        positions: Which records these are.
        labels: Class of each of them.
        sizes: Height and width of each of them, in pixels.
        names: What messages call the records; None: by position.
        superlabels: Group that the class of each belongs to, where classes are grouped.
        decode: From an image file's bytes and a number of channels to the image.
    """

    records: Sequence[Mapping[str, Any]]
    positions: Int[np.ndarray, " images"]
    labels: Int[np.ndarray, " images"]
    sizes: Int[np.ndarray, "images 2"]
    names: Sequence[str] | None = None
    superlabels: Int[np.ndarray, " images"] | None = None
    decode: Callable[[bytes, int], Image.Image] = pixels.decode

    def __len__(self) -> int:
        """Number of images."""
        return len(self.positions)

    @property
    def num_classes(self) -> int:
        """Number of distinct labels."""
        return len(np.unique(self.labels))

    def describe(self) -> str:
        """How much there is, in words."""
        told = f"{self.num_classes} classes"
        if self.superlabels is not None:
            told += f" in {len(np.unique(self.superlabels))} groups"
        return f"{told}, {len(self)} images"

    def name(self, i: int) -> str:
        """What to call the i-th image in a message."""
        record = int(self.positions[i])
        return f"record {record}" if self.names is None else self.names[record]

    def image(self, i: int, channels: int) -> Image.Image:
        """Decodes the i-th image.

        Raises:
            UserError: It cannot be read; the message names it.
        """
        try:
            return self.decode(self.records[int(self.positions[i])]["image"], channels)
        except Exception as error:  # Decoders of damaged files raise whatever they meet.
            raise UserError(f"cannot read {self.name(i)} ({pixels.reason(error)})") from error

    def take(self, chosen: Int[np.ndarray, " chosen"]) -> "Dataset":
        """Some of the images, by their place."""
        return dataclasses.replace(
            self,
            positions=self.positions[chosen],
            labels=self.labels[chosen],
            sizes=self.sizes[chosen],
            superlabels=None if self.superlabels is None else self.superlabels[chosen],
        )

    def renumbered(self) -> "Dataset":
        """The same with classes numbered from 0 without gaps."""
        return dataclasses.replace(self, labels=np.unique(self.labels, return_inverse=True)[1])

    def of_classes(self, classes: Int[np.ndarray, " classes"]) -> "Dataset":
        """The images of some classes, which are numbered anew from 0."""
        return self.take(np.flatnonzero(np.isin(self.labels, classes))).renumbered()


class Splits(NamedTuple):
    """The parts of a benchmark.

    Attributes:
        train: To learn from.
        validation: Training classes held out to choose by; None where none are.
        test: To report, and never to choose by.
        gallery: What the test images search; None: one another.
        fingerprint: Differs where any image of the dataset does, by all that its index tells.
    """

    train: Dataset
    validation: Dataset | None
    test: Dataset
    gallery: Dataset | None
    fingerprint: str


def open_splits(config: ConfigDict) -> Splits:
    """Opens a dataset, and prepares it first if it can be made without any download.

    Args:
        config: The run's whole configuration.

    Raises:
        UserError: The dataset is unknown, cannot be prepared or read, or has too few classes.
    """
    if config.data.name == "folder":
        from hypjax.data.photos import open_photos

        return open_photos(config)
    builder = open_builder(config.data.name, config.run.data_dir)
    train, test = _open(builder, "train"), _open(builder, "test")
    index = [array.tobytes() for part in (train, test) for array in (part.labels, part.sizes)]
    fingerprint = hashlib.sha256(b"".join([builder.info.full_name.encode(), *index])).hexdigest()
    train, validation = hold_out(
        train, config.data.validation_classes, config.data.split_seed, "validation"
    )
    return Splits(train, validation, test, gallery=None, fingerprint=fingerprint[:32])


def open_builder(name: str, data_dir: str | None) -> tfds.core.DatasetBuilder:
    """Opens a dataset's builder, prepared.

    Raises:
        UserError: There is no such dataset, or it cannot be prepared.
    """
    if name in DATASETS and name not in BUILDERS:
        raise UserError(
            f"this version of hypjax cannot read {name} yet; until then, its images train as own "
            "images: --config.data.name=folder --config.data.path=TABLE.csv"
        )
    if name not in BUILDERS:
        raise UserError(f"no dataset is named {name!r}{nearest(name, BUILDERS)}")
    builder = BUILDERS[name](data_dir=data_dir)
    if not pathlib.Path(builder.data_dir).exists():
        _prepare(builder)
    return builder


def _prepare(builder: tfds.core.DatasetBuilder) -> None:
    print(f"preparing {builder.name} in {builder.data_dir} (once)", file=sys.stderr, flush=True)
    tfds.disable_progress_bar()
    with _writing_to(builder.data_dir), contextlib.redirect_stdout(io.StringIO()):
        builder.download_and_prepare()


@contextlib.contextmanager
def _writing_to(directory: str) -> Iterator[None]:
    """Tells a user who may not write, or has no space left, what to do."""
    try:
        yield
    except (OSError, RuntimeError) as error:  # ArrayRecord's writer raises the latter.
        reason = getattr(error, "strerror", None) or str(error).split(";")[0]
        raise UserError(
            f"cannot write to {directory} ({reason}); "
            "name another folder with --config.run.data_dir"
        ) from error


def _open(builder: tfds.core.DatasetBuilder, split: str) -> Dataset:
    records = builder.as_data_source(split, decoders={"image": tfds.decode.SkipDecoding()})
    path = pathlib.Path(builder.data_dir) / f"index-{split}.npz"
    if not path.exists():
        with _writing_to(builder.data_dir):
            _write_index(path, records)
    with np.load(path) as index:
        return Dataset(records, np.arange(len(records)), index["labels"], index["sizes"])


def _write_index(path: pathlib.Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Reads all records once; a rename makes the file appear whole or not at all."""
    rows = [(r["label"], r["height"], r["width"]) for r in records]
    index = np.array(rows, np.int32)
    unfinished = path.with_name(f".{path.stem}-{os.getpid()}.npz")
    np.savez(unfinished, labels=index[:, 0], sizes=index[:, 1:])
    unfinished.replace(path)


def hold_out(
    dataset: Dataset, amount: float, seed: int, name: str
) -> tuple[Dataset, Dataset | None]:
    """Takes some classes, chosen at random, out of a dataset.

    Args:
        dataset: Where to take them from.
        amount: How many classes, from 1 on; below 1, their share, but two at least. 0: none.
        seed: Of the choice. It is not a run's, so that runs with other seeds are compared on the
            same classes.
        name: Of the part that is taken out: test or validation.

    Returns:
        The rest, and what was taken out.

    Raises:
        UserError: Fewer than two classes would be left.
    """
    classes = np.unique(dataset.labels)
    count = int(amount) if amount >= 1 or amount == 0 else max(2, round(amount * len(classes)))
    if count > len(classes) - 2:
        least = "two at least, so " if 0 < amount < 1 else ""
        raise UserError(
            f"config.data.{name}_classes is {amount:g}, {least}{count} of {len(classes)} classes, "
            "but two must remain to train on; "
            f"set --config.data.{name}_classes={max(len(classes) - 2, 0)} or less"
        )
    shuffled = np.random.default_rng(seed).permutation(classes)
    rest = dataset.of_classes(shuffled[count:])
    return rest, dataset.of_classes(shuffled[:count]) if count else None
