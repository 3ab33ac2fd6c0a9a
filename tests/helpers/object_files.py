"""Writes small copies of Revisited Oxford and of SfM-120k, in their official folders and lists."""

import pathlib
import pickle
from collections.abc import Collection

import numpy as np

from tests.helpers.official_files import picture

QUERIES, GALLERY, CLUSTERS, PHOTOS = 2, 6, 4, 3


def judged(query: int) -> dict[str, object]:
    """What the ground truth says of a query; the second one has no hard image."""
    return {
        "bbx": [2.4, 3, 15.6, 12],
        "easy": np.array([query]),
        "hard": [] if query else [2, 5],
        "junk": np.array([4], np.int32),
    }


def write_roxford(root: pathlib.Path, missing: Collection[str] = ()) -> pathlib.Path:
    """Writes root/roxford5k: two queries and six images to search, but the missing ones."""
    folder = root / "roxford5k"
    (folder / "jpg").mkdir(parents=True)
    names = {"qimlist": [f"keble_{i:06d}" for i in range(QUERIES)]}
    names["imlist"] = [f"oxford_{i:06d}" for i in range(GALLERY)]
    for name in (name for part in names.values() for name in part if name not in missing):
        (folder / f"jpg/{name}.jpg").write_bytes(picture(name, name))
    truth = {**names, "gnd": [judged(i) for i in range(QUERIES)]}
    (folder / "gnd_roxford5k.pkl").write_bytes(pickle.dumps(truth))
    return folder


def sfm_names(split: str) -> list[str]:
    """Names of a split's images, cluster by cluster."""
    return [f"{ord(split[0]):030x}{i:02x}" for i in range(CLUSTERS * PHOTOS)]


def write_sfm(root: pathlib.Path, missing: Collection[str] = ()) -> pathlib.Path:
    """Writes root/retrieval-SfM-120k: four clusters of three photos in each of its parts.

    In each cluster the first two photos are a pair, and the second and the third.
    """
    folder, lists = root / "retrieval-SfM-120k", {}
    for split in ("train", "val"):
        names = sfm_names(split)
        for name in (name for name in names if name not in missing):
            path = folder / "ims" / name[-2:] / name[-4:-2] / name[-6:-4] / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(picture(name, name))
        firsts = [PHOTOS * c + i for c in range(CLUSTERS) for i in range(PHOTOS - 1)]
        clusters = np.repeat(np.arange(CLUSTERS), PHOTOS)
        lists[split] = {
            "cids": names,
            "cluster": clusters.tolist() if split == "train" else clusters,
            "qidxs": firsts,
            "pidxs": [i + 1 for i in firsts],
        }
    (folder / "retrieval-SfM-120k.pkl").write_bytes(pickle.dumps(lists))
    return folder
