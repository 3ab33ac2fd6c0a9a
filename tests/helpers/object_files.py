"""Writes small copies of Revisited Oxford and of SfM-120k, in their official folders and lists."""

import pickle

import numpy as np

from tests.helpers.official_files import picture


def write_roxford(root, missing=()):
    """Writes root/roxford5k: two queries, the second without a hard image, and six images."""
    folder = root / "roxford5k"
    (folder / "jpg").mkdir(parents=True)
    queries, gallery = (
        [f"{x}_{i:06d}" for i in range(n)] for x, n in (("keble", 2), ("oxford", 6))
    )
    for name in {*queries, *gallery} - {*missing}:
        (folder / f"jpg/{name}.jpg").write_bytes(picture(name, name))
    common = {"bbx": [2.4, 3, 15.6, 12], "junk": np.array([4], np.int32)}
    truth = [common | {"easy": np.array([i]), "hard": [[2, 5], []][i]} for i in range(2)]
    contents = {"qimlist": queries, "imlist": gallery, "gnd": truth}
    (folder / "gnd_roxford5k.pkl").write_bytes(pickle.dumps(contents))
    return folder


def sfm_names(split):
    """Names of a split's images, cluster by cluster."""
    return [f"{ord(split[0]):030x}{i:02x}" for i in range(12)]


def write_sfm(root, missing=()):
    """Writes root/retrieval-SfM-120k: four clusters of three photos in each of its parts.

    In each cluster the first two photos are a pair, and the second and the third.
    """
    folder, lists = root / "retrieval-SfM-120k", {}
    anchors, clusters = [0, 1, 3, 4, 6, 7, 9, 10], np.repeat(np.arange(4), 3)
    for split, cluster in (("train", clusters.tolist()), ("val", clusters)):
        for name in {*sfm_names(split)} - {*missing}:
            path = folder / "ims" / name[-2:] / name[-4:-2] / name[-6:-4] / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(picture(name, name))
        lists[split] = {"cids": sfm_names(split), "cluster": cluster, "qidxs": anchors}
        lists[split]["pidxs"] = [i + 1 for i in anchors]
    (folder / "retrieval-SfM-120k.pkl").write_bytes(pickle.dumps(lists))
    return folder
