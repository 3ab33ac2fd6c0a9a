"""TFDS builders of the datasets that are read from published files."""

import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import pyarrow
import tensorflow_datasets as tfds

from hypjax.data.records import Example, RecordBuilder
from hypjax.errors import UserError


class Contents(Protocol):
    """What a dataset's records will hold.

    Attributes:
        classes: Names of all classes, in the order of their labels.
        tables: Tables of relations.
    """

    classes: Sequence[str]
    tables: Mapping[str, pyarrow.Table]

    def splits(self) -> Mapping[str, Iterable[Example]]:
        """Returns the examples of each split, to be consumed split by split."""

    def finish(self, folder: pathlib.Path) -> None:
        """Called after the last example; if it raises, the folder is discarded."""


class OfficialBuilder(RecordBuilder, skip_registration=True):
    """Builder of a dataset that is read from the files its authors published."""

    VERSION = tfds.core.Version("1.0.0")
    RELEASE_NOTES = {"1.0.0": "First version."}

    _contents: Contents | None = None

    def set_contents(self, contents: Contents) -> None:
        """Sets what `download_and_prepare` will write."""
        self._contents = contents

    def _generate_splits(
        self,
        dl_manager: tfds.download.DownloadManager,
        download_config: tfds.download.DownloadConfig,
    ) -> list[tfds.core.SplitInfo]:
        written = super()._generate_splits(dl_manager, download_config)
        self._contents.finish(pathlib.Path(self.data_dir))
        return written

    def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> dict[str, Any]:
        del dl_manager
        if self._contents is None:
            raise UserError(
                f"{self.name} is not prepared in {self.data_dir}; "
                f"run python -m hypjax.prepare --dataset={self.name}"
            )
        self.info.features["label"].names = list(self._contents.classes)
        splits = self._contents.splits()
        return {name: self._generate_examples(part) for name, part in splits.items()}

    def tables(self) -> Mapping[str, pyarrow.Table]:
        """Returns those of the published files."""
        return self._contents.tables

    def _generate_examples(self, examples: Iterable[Example]) -> Iterator[tuple[int, Example]]:
        yield from enumerate(examples)
