"""Ground truth of Revisited Oxford and Paris (Radenović et al., CVPR 2018)."""

import pathlib
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from hypjax.data import safe_pickle
from hypjax.data.pixels import read_bytes
from hypjax.errors import UserError, explained
from hypjax.types import GroundTruth


class Benchmark(NamedTuple):
    """Queries, the gallery that they search, and the ground truth."""

    queries: tuple[str, ...]  # Names of images, without a suffix.
    gallery: tuple[str, ...]
    # Each query's box around its object: left, top, right and bottom, in pixels.
    boxes: Float[np.ndarray, "queries 4"]
    ground_truth: GroundTruth  # Indices into the gallery.


def read_ground_truth(path: str | pathlib.Path) -> Benchmark:
    """Reads a file such as `gnd_roxford5k.pkl`, without running code that it may hold.

    Raises a UserError if the file cannot be read, could run code, is damaged or of another kind.
    """
    path = pathlib.Path(path).expanduser()
    with explained(f"cannot read {path}"):
        loaded = safe_pickle.loads(read_bytes(path), str(path))
    try:
        queries, gallery = (tuple(map(str, loaded[key])) for key in ("qimlist", "imlist"))
        rows = list(loaded["gnd"])
        boxes = np.array([row["bbx"] for row in rows], np.float64).reshape(len(queries), 4)
        levels = GroundTruth._fields
        lists = {key: [safe_pickle.as_indices(row[key]) for row in rows] for key in levels}
    except Exception as error:  # A pickle of another structure may raise almost anything.
        raise UserError(f"{path} is not a ground truth of qimlist, imlist and gnd") from error
    items = np.concatenate([[0], *(items for part in lists.values() for items in part)])
    if not gallery or items.min() < 0 or items.max() >= len(gallery):
        raise UserError(f"{path} is damaged: it judges images outside of imlist; fetch it again")
    return Benchmark(queries, gallery, boxes, GroundTruth(**lists))
