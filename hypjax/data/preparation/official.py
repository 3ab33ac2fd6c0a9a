"""Official datasets: what describes one, from its published files to the images it lists.

Class numbers, splits and counts follow the official lists and the protocol by which retrieval is
reported on these datasets (Ermolov et al., CVPR 2022, section 4.1, and the papers it follows).
"""

import contextlib
import dataclasses
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import pyarrow

from hypjax.data.preparation.builders import OfficialBuilder
from hypjax.data.preparation.sources import FileTree, Source
from hypjax.errors import UserError


class Count(NamedTuple):
    """Size of a split.

    Attributes:
        images: Number of images.
        classes: Number of classes; None if it is not known, so that it is not compared.
    """

    images: int
    classes: int | None


class ListedImage(NamedTuple):
    """One image that a dataset lists.

    Attributes:
        name: Path within the dataset, with '/'; unique.
        label: Name of the class, unique within the dataset.
        read: Returns the file's bytes unchanged; safe to call from several threads. Raises OSError
            if the file cannot be read.
        superlabel: Name of the coarser class; '' if the dataset has none.
    """

    name: str
    label: str
    read: Callable[[], bytes]
    superlabel: str = ""


Listing = dict[str, list[ListedImage]]  # Images by split.


class Found(NamedTuple):
    """What a copy of a dataset holds.

    Attributes:
        images: The images of each split.
        tables: Its tables of relations, see `hypjax.data.relations`.
    """

    images: Listing
    tables: Mapping[str, pyarrow.Table]


def _no_tables(tree: FileTree) -> Mapping[str, pyarrow.Table]:
    del tree
    return {}


@dataclasses.dataclass(frozen=True)
class OfficialDataset:
    """A dataset prepared from the files that its authors published.

    Attributes:
        builder: TFDS builder of its records; the dataset has the builder's name.
        counts: Size of each split of the complete dataset.
        source: Where its files come from.
        list_images: Lists the images of each split whose files exist.
        tables: Reads the tables of relations that its builder has.
    """

    builder: type[OfficialBuilder]
    counts: Mapping[str, Count]
    source: Source
    list_images: Callable[[FileTree], Listing]
    tables: Callable[[FileTree], Mapping[str, pyarrow.Table]] = _no_tables

    @property
    def name(self) -> str:
        """Name of the dataset."""
        return self.builder.name

    @contextlib.contextmanager
    def open(self, manual_dir: pathlib.Path | None, downloads: pathlib.Path) -> Iterator[Found]:
        """Finds or downloads the files, and lists the images of each split.

        Listed images whose files are missing are left out, so a split may be empty.

        Args:
            manual_dir: The dataset's folder, a folder that contains it, or a folder with its
                archives. If None, `downloads` is searched, and missing archives are downloaded
                where possible.
            downloads: Folder for downloads and temporary files.

        Yields:
            The images by split, in the dataset's own order of classes and readable within the
            body, and the tables of relations.

        Raises:
            UserError: If no images are found, or a list or an archive is damaged.
        """
        with self.source.open(self.name, manual_dir, downloads) as tree:
            listing = self.list_images(tree)
            if not any(listing.values()):
                raise UserError(f"{tree.root} has no images of {self.name}; {self.source.advice}")
            yield Found(listing, self.tables(tree))
