"""Datasets on disk: records by position, beside an index of what plans need to know of them."""

import contextlib
import dataclasses
import io
import os
import pathlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow_datasets as tfds
from jaxtyping import Int
from ml_collections import ConfigDict

from hypjax.data.glyphs import Glyphs
from hypjax.errors import UserError

BUILDERS = {"glyphs": Glyphs}

# Which training classes are held out for validation does not vary with a run's seed, so that runs
# with different seeds are compared on the same ones.
_VALIDATION_SEED = 0


@dataclasses.dataclass(frozen=True, eq=False)
class Dataset:
    """Some records of one split, in a fixed order.

    Attributes:
        records: Random access to the split's records; `image` holds the encoded bytes.
        positions: Which records these are.
        labels: Class of each of them.
        sizes: Height and width of each of them, in pixels.
    """

    records: Sequence[Mapping[str, Any]]
    positions: Int[np.ndarray, " images"]
    labels: Int[np.ndarray, " images"]
    sizes: Int[np.ndarray, "images 2"]

    def __len__(self) -> int:
        """Number of images."""
        return len(self.positions)

    @property
    def num_classes(self) -> int:
        """Number of distinct labels."""
        return len(np.unique(self.labels))

    def encoded_image(self, i: int) -> bytes:
        """Bytes of the i-th image file."""
        return self.records[int(self.positions[i])]["image"]

    def of_classes(self, classes: Int[np.ndarray, " classes"]) -> "Dataset":
        """The images of some classes, which are numbered anew from 0."""
        chosen = np.flatnonzero(np.isin(self.labels, classes))
        return Dataset(
            records=self.records,
            positions=self.positions[chosen],
            labels=np.unique(self.labels[chosen], return_inverse=True)[1],
            sizes=self.sizes[chosen],
        )


class Splits(NamedTuple):
    """The three parts of a benchmark; no class is in two of them.

    Attributes:
        train: To learn from.
        validation: Training classes held out to choose by; None where none are.
        test: To report, and never to choose by.
    """

    train: Dataset
    validation: Dataset | None
    test: Dataset


def open_splits(config: ConfigDict) -> Splits:
    """Opens a dataset, and prepares it first if it can be made without any download.

    Args:
        config: The run's whole configuration.

    Raises:
        UserError: The dataset is unknown, cannot be prepared, or has too few classes.
    """
    builder = BUILDERS[config.data.name](data_dir=config.run.data_dir)
    if not pathlib.Path(builder.data_dir).exists():
        _prepare(builder)
    train, validation = _hold_out(_open(builder, "train"), config.data.validation_classes)
    return Splits(train, validation, _open(builder, "test"))


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


def _hold_out(train: Dataset, count: int) -> tuple[Dataset, Dataset | None]:
    """Takes some classes, chosen at random, out of the training set."""
    classes = np.unique(train.labels)
    if count > len(classes) - 2:
        raise UserError(
            f"config.data.validation_classes is {count}, "
            f"but there are {len(classes)} training classes"
        )
    shuffled = np.random.default_rng(_VALIDATION_SEED).permutation(classes)
    rest = train.of_classes(shuffled[count:])
    return rest, train.of_classes(shuffled[:count]) if count else None
