"""Revisited Oxford and Paris: photos of buildings (Radenović et al., 2018).

Images have no classes: a ground truth lists the gallery images that each query should find.
"""

import functools
from collections.abc import Iterator

import numpy as np
import pyarrow

from hypjax.data.ground_truth import read_ground_truth
from hypjax.data.preparation.official import Archive, Count, Entry, FileTree, OfficialDataset
from hypjax.data.records import JUDGEMENTS, JUDGEMENTS_SCHEMA


def _list_images(name: str, tree: FileTree) -> Iterator[Entry]:
    """Lists queries and gallery in the order of the ground truth, whose names have no suffixes."""
    truth = read_ground_truth(tree.root / f"gnd_{name}.pkl")
    files = {file.rpartition("/")[2].removesuffix(".jpg"): file for file in sorted(tree.files)}
    for split, images in (("query", truth.queries), ("gallery", truth.gallery)):
        for image in images:
            yield Entry(split, image, name, file=files.get(image, ""))


def _judgements(name: str, tree: FileTree) -> pyarrow.Table:
    """Returns the ground truth by names, with boxes rounded to pixels like in Pillow's crop."""
    truth = read_ground_truth(tree.root / f"gnd_{name}.pkl")
    columns = {"query": truth.queries, "box": np.rint(truth.boxes).astype(int).tolist()}
    for level, rows in truth.ground_truth._asdict().items():
        columns[level] = [[truth.gallery[i] for i in items] for items in rows]
    return pyarrow.table(columns, JUDGEMENTS_SCHEMA)


def _dataset(name: str, images: int, old_folder: str, *archives: str) -> OfficialDataset:
    return OfficialDataset(
        name=name,
        counts={"query": Count(70, 1), "gallery": Count(images, 1)},
        folders=(name, old_folder),
        entries=("jpg", "*.jpg", "paris", f"gnd_{name}.pkl"),
        archives=tuple(Archive(file, unpacked="jpg/*.jpg") for file in archives),
        source=(
            f"{', '.join(archives)} from https://www.robots.ox.ac.uk/~vgg/data, and gnd_{name}.pkl "
            "from http://cmp.felk.cvut.cz/revisitop"
        ),
        list_images=functools.partial(_list_images, name),
        tables={JUDGEMENTS: functools.partial(_judgements, name)},
    )


ROXFORD = _dataset("roxford5k", 4993, "oxford5k", "oxbuild_images-v1.tgz")
RPARIS = _dataset("rparis6k", 6322, "paris6k", "paris_1-v1.tgz", "paris_2-v1.tgz")

DISTRACTORS = OfficialDataset(
    name="revisitop1m",
    counts={"gallery": Count(1_001_001, 1)},
    folders=("revisitop1m",),
    entries=("jpg",),
    archives=tuple(Archive(f"revisitop1m.{i}.tar.gz", unpacked="jpg/*") for i in range(1, 101)),
    source="revisitop1m.1.tar.gz to revisitop1m.100.tar.gz from http://cmp.felk.cvut.cz/revisitop",
    list_images=lambda tree: (
        Entry("gallery", name, "revisitop1m")
        for name in sorted(tree.files)
        if name.endswith(".jpg")
    ),
)
