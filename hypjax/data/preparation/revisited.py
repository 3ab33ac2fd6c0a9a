"""Revisited Oxford and Paris: photos of buildings, judged for each query (Radenović et al., 2018).

Queries are not in the gallery. The images have no classes: a query should find the images that are
judged to show the same building.
"""

import functools
from collections.abc import Iterator

import numpy as np
import pyarrow

from hypjax.data.ground_truth import GroundTruth, parse_ground_truth
from hypjax.data.preparation.official import Count, Entry, OfficialBuilder, OfficialDataset
from hypjax.data.preparation.sources import Archive, FileTree, Source
from hypjax.data.records import JUDGEMENTS, JUDGEMENTS_SCHEMA

_ORIGIN = "https://www.robots.ox.ac.uk/~vgg/data and http://cmp.felk.cvut.cz/revisitop"


class ROxford5k(OfficialBuilder, skip_registration=True):
    """Revisited Oxford: 70 queries search 4,993 images."""

    name = "roxford5k"
    DESCRIPTION = "Revisited Oxford: 70 queries with boxes, and a gallery with judgements."
    TABLES = (JUDGEMENTS,)


class RParis6k(OfficialBuilder, skip_registration=True):
    """Revisited Paris: 70 queries search 6,322 images."""

    name = "rparis6k"
    DESCRIPTION = "Revisited Paris: 70 queries with boxes, and a gallery with judgements."
    TABLES = (JUDGEMENTS,)


def _ground_truth(name: str, tree: FileTree) -> GroundTruth:
    file = f"gnd_{name}.pkl"
    return parse_ground_truth(tree.read_list(file), str(tree.root / file))


def _list_images(name: str, tree: FileTree) -> Iterator[Entry]:
    """Lists queries and gallery in the order of the ground truth, which has no suffixes."""
    truth, place = _ground_truth(name, tree), str(tree.root / f"gnd_{name}.pkl")
    files = {file.rpartition("/")[2].removesuffix(".jpg"): file for file in sorted(tree.files)}
    for split, listed in (("query", truth.queries), ("gallery", truth.gallery)):
        for image in listed:
            yield Entry(split, image, name, place=place, file=files.get(image, ""))


def _tables(name: str, tree: FileTree) -> dict[str, pyarrow.Table]:
    """The judgements by name, with boxes rounded to pixels as Pillow's crop rounds them."""
    truth = _ground_truth(name, tree)
    lists = {
        level: [[truth.gallery[i] for i in items] for items in judged]
        for level, judged in truth.judgements._asdict().items()
    }
    columns = {"query": truth.queries, "box": np.rint(truth.boxes).astype(int).tolist(), **lists}
    return {JUDGEMENTS: pyarrow.table(columns, JUDGEMENTS_SCHEMA)}


def _dataset(
    builder: type[OfficialBuilder], images: int, folders: tuple[str, ...], archives: tuple[str, ...]
) -> OfficialDataset:
    name = builder.name
    return OfficialDataset(
        builder=builder,
        counts={"query": Count(70, 1), "gallery": Count(images, 1)},
        source=Source(
            folders=folders,
            entries=("jpg", "*.jpg", "paris", f"gnd_{name}.pkl"),
            archives=tuple(Archive(file, unpacked="jpg/*.jpg") for file in archives),
            required=f"{', '.join(archives)} and gnd_{name}.pkl",
            origin=_ORIGIN,
            required_lists=(f"gnd_{name}.pkl",),
        ),
        list_images=functools.partial(_list_images, name),
        tables=functools.partial(_tables, name),
    )


ROXFORD = _dataset(ROxford5k, 4993, ("roxford5k", "oxford5k"), ("oxbuild_images-v1.tgz",))
RPARIS = _dataset(RParis6k, 6322, ("rparis6k", "paris6k"), ("paris_1-v1.tgz", "paris_2-v1.tgz"))


class RevisitOp1M(OfficialBuilder, skip_registration=True):
    """Distractors of Revisited Oxford and Paris: a million photos that show neither city."""

    name = "revisitop1m"
    DESCRIPTION = "The distractors of Revisited Oxford and Paris, a gallery without queries."


def _list_distractors(tree: FileTree) -> Iterator[Entry]:
    """Lists all photos by path."""
    for file in sorted(tree.files):
        if file.endswith(".jpg"):
            yield Entry("gallery", file, RevisitOp1M.name)


_PARTS = tuple(f"revisitop1m.{i}.tar.gz" for i in range(1, 101))
DISTRACTORS = OfficialDataset(
    builder=RevisitOp1M,
    counts={"gallery": Count(1_001_001, 1)},
    source=Source(
        folders=("revisitop1m",),
        entries=("jpg",),
        archives=tuple(Archive(file, unpacked="jpg/*") for file in _PARTS),
        required="revisitop1m.1.tar.gz to revisitop1m.100.tar.gz",
        origin="http://cmp.felk.cvut.cz/revisitop",
    ),
    list_images=_list_distractors,
)
