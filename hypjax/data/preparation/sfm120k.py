"""Retrieval-SfM-120k: photos of landmarks, reconstructed in 3D (Radenović et al., TPAMI 2019).

A class is a cluster: the photos of one reconstruction. Two photos of a cluster may show different
sides of a building; the dataset lists pairs that show the same side.
"""

from typing import Any

import pyarrow

from hypjax.data.ground_truth import as_indices, load_pickle
from hypjax.data.preparation.official import Archive, Count, Entry, FileTree, OfficialDataset
from hypjax.data.records import PAIRS, PAIRS_SCHEMA

_LIST = "retrieval-SfM-120k.pkl"
_SPLITS = {"train": "train", "val": "test"}  # By their names in the list.
_Listed = tuple[list[Entry], list[tuple[str, str]]]  # Images, and pairs of their names.


def _read(tree: FileTree) -> dict[str, _Listed]:
    """Reads the published list, without running code that it may hold."""
    loaded = load_pickle(tree.read_list(_LIST), str(tree.root / _LIST))
    try:
        return {split: _listed(split, loaded[name]) for name, split in _SPLITS.items()}
    except Exception as error:  # A pickle of another structure may raise almost anything.
        problem = "it needs train and val, each with cids, cluster, qidxs and pidxs that fit"
        raise tree.damaged(_LIST, problem) from error


def _listed(split: str, loaded: dict[str, Any]) -> _Listed:
    """Lists the images and the pairs of one split of the list."""
    names, keys = list(loaded["cids"]), ("cluster", "qidxs", "pidxs")
    clusters, anchors, positives = (as_indices(loaded[key]).tolist() for key in keys)
    entries = []
    for name, cluster in zip(names, clusters, strict=True):
        # Folders are named by the last characters of their files' names.
        file = f"ims/{name[-2:]}/{name[-4:-2]}/{name[-6:-4]}/{name}"
        entries.append(Entry(split, name, f"{split} cluster {cluster}", file=file))
    return entries, [(names[i], names[j]) for i, j in zip(anchors, positives, strict=True)]


def _pairs(tree: FileTree) -> pyarrow.Table:
    _, pairs = _read(tree)["train"]
    return pyarrow.table(list(zip(*pairs, strict=True)), schema=PAIRS_SCHEMA)


DATASET = OfficialDataset(
    name="sfm120k",
    # As in the paper and as the released loader reports; the clusters of test are not checked.
    counts={"train": Count(91_642, 551), "test": Count(6_403, None)},
    folders=("retrieval-SfM-120k", "sfm120k"),
    entries=("ims", _LIST),
    archives=(Archive("ims/ims.tar.gz", unpacked="ims/[0-9a-f]*"),),
    source=f"ims/ims.tar.gz and {_LIST} from http://cmp.felk.cvut.cz/cnnimageretrieval",
    list_images=lambda tree: (entry for entries, _ in _read(tree).values() for entry in entries),
    tables={PAIRS: _pairs},
)
