"""The datasets by name, as TFDS builders: `BUILDERS["cub200"](data_dir=...)`."""

import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import tensorflow_datasets as tfds

from hypjax.data.preparation.glyphs import Glyphs
from hypjax.data.records import Example, RecordBuilder
from hypjax.errors import UserError


class Contents(Protocol):
    """What a benchmark's records are to hold.

    Attributes:
        classes: Names of all classes, in the order of their labels.
    """

    classes: Sequence[str]

    def splits(self) -> Mapping[str, Iterable[Example]]:
        """Examples of each split, which are taken split by split."""

    def finish(self, folder: pathlib.Path) -> None:
        """Called when all are written, in a folder that goes away again if it raises."""


class Benchmark(RecordBuilder, skip_registration=True):
    """A dataset that is read from the files its authors published, see `preparation`."""

    VERSION = tfds.core.Version("1.0.0")
    RELEASE_NOTES = {"1.0.0": "First version."}

    _contents: Contents | None = None

    def fill(self, contents: Contents) -> None:
        """Says what `download_and_prepare` is to write."""
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

    def _generate_examples(self, examples: Iterable[Example]) -> Iterator[tuple[int, Example]]:
        yield from enumerate(examples)


class Cub200(Benchmark, skip_registration=True):
    """CUB-200-2011: birds, trained on the first hundred species and tested on the others."""

    DESCRIPTION = "Caltech-UCSD Birds-200-2011, split by class: 1 to 100, 101 to 200."


class Cars196(Benchmark, skip_registration=True):
    """Cars-196: car models, trained on the first 98 and tested on the others."""

    DESCRIPTION = "Stanford Cars, split by class over all images: 1 to 98, 99 to 196."


class Sop(Benchmark, skip_registration=True):
    """Stanford Online Products: photos of things for sale, in twelve groups."""

    DESCRIPTION = "Stanford Online Products, with its own split by class."


class Inshop(Benchmark, skip_registration=True):
    """DeepFashion's In-Shop Clothes Retrieval: queries search a gallery."""

    DESCRIPTION = "In-Shop Clothes Retrieval, with its own train, query and gallery."


class Omniglot(Benchmark, skip_registration=True):
    """Omniglot: handwritten characters of fifty alphabets, thirty of which to train on."""

    DESCRIPTION = "Omniglot, its background alphabets for training, its evaluation ones for test."


BUILDERS: dict[str, type[RecordBuilder]] = {
    builder.name: builder for builder in (Glyphs, Cub200, Cars196, Sop, Inshop, Omniglot)
}
