"""Retrieval-SfM-120k: photos of landmarks, reconstructed in 3D (Radenović et al., TPAMI 2019).

A class is a cluster, the photos of one reconstruction. Two photos of a cluster may show different
sides of a building; the dataset lists pairs that show the same.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import pyarrow

from hypjax.data import safe_pickle
from hypjax.data.preparation.official import Count, Entry, OfficialDataset
from hypjax.data.preparation.sources import Archive, FileTree, Source
from hypjax.data.records import PAIRS, PAIRS_SCHEMA
from hypjax.errors import UserError

_LIST = "retrieval-SfM-120k.pkl"
_PARTS = {"train": "train", "val": "test"}  # Names in the list, and ours.


class _Part(NamedTuple):
    """A part of the list: images, their clusters, and pairs of images by index."""

    names: list[str]
    clusters: list[int]
    anchors: list[int]
    positives: list[int]


def _read(tree: FileTree) -> dict[str, _Part]:
    """Reads the list; raises UserError if it is missing, damaged or could run code."""
    place = str(tree.root / _LIST)
    loaded = safe_pickle.loads(tree.read_list(_LIST), place)
    try:
        parts = {ours: _part(loaded[name]) for name, ours in _PARTS.items()}
    except safe_pickle.UNEXPECTED as error:
        raise UserError(
            f"{place} is not the list of Retrieval-SfM-120k: it needs train and val, each with "
            "cids, cluster, qidxs and pidxs"
        ) from error
    for name, part in parts.items():
        if problem := _problem(part):
            raise UserError(f"{place} is damaged: its part {name} {problem}; fetch it again")
    return parts


def _part(loaded: dict[str, Any]) -> _Part:
    numbers = (
        safe_pickle.as_indices(loaded[key]).tolist() for key in ("cluster", "qidxs", "pidxs")
    )
    return _Part(list(loaded["cids"]), *numbers)


def _problem(part: _Part) -> str | None:
    """Says what contradicts the rest; None if nothing does."""
    names, clusters, anchors, positives = part
    if not names or not all(isinstance(name, str) and len(name) > 6 for name in names):
        return "has no names of images"
    if len(clusters) != len(names):
        return f"names {len(names)} images and {len(clusters)} clusters"
    if len(anchors) != len(positives):
        return f"has {len(anchors)} queries and {len(positives)} positives"
    if {*anchors, *positives} - set(range(len(names))):
        return f"pairs an image outside 0 to {len(names) - 1}"
    return None


def _list_images(tree: FileTree) -> Iterator[Entry]:
    place = str(tree.root / _LIST)
    for split, part in _read(tree).items():
        for name, cluster in zip(part.names, part.clusters, strict=True):
            # Folders are named by the last characters.
            file = f"ims/{name[-2:]}/{name[-4:-2]}/{name[-6:-4]}/{name}"
            yield Entry(split, name, f"{split} cluster {cluster}", place=place, file=file)


def _pairs(tree: FileTree) -> pyarrow.Table:
    part = _read(tree)["train"]
    columns = [[part.names[i] for i in column] for column in (part.anchors, part.positives)]
    return pyarrow.table(columns, schema=PAIRS_SCHEMA)


DATASET = OfficialDataset(
    name="sfm120k",
    description="Retrieval-SfM-120k, its validation clusters as the test part.",
    # Of the released loader's report and the paper; clusters of the test part are not compared.
    counts={"train": Count(91_642, 551), "test": Count(6_403, None)},
    source=Source(
        folders=("retrieval-SfM-120k", "sfm120k"),
        entries=("ims", _LIST),
        archives=(Archive("ims/ims.tar.gz", unpacked="ims/[0-9a-f]*"),),
        required=f"ims/ims.tar.gz and {_LIST}",
        origin="http://cmp.felk.cvut.cz/cnnimageretrieval",
        required_lists=(_LIST,),
    ),
    list_images=_list_images,
    tables={PAIRS: _pairs},
)
