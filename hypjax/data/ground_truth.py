"""Ground truth of Revisited Oxford and Paris (Radenović et al., CVPR 2018)."""

import pathlib
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from hypjax.data import safe_pickle
from hypjax.data.pixels import read_bytes
from hypjax.data.safe_pickle import as_array, as_indices
from hypjax.errors import UserError
from hypjax.types import Judgements

_JUDGED = Judgements._fields


class GroundTruth(NamedTuple):
    """What each query should find.

    Attributes:
        queries: Names of the query images, without a suffix.
        gallery: Names of the images to search.
        boxes: Part of each query image that shows the object: left, top, right and bottom, in
            pixels.
        judgements: Indices into the gallery.
    """

    queries: tuple[str, ...]
    gallery: tuple[str, ...]
    boxes: Float[np.ndarray, "queries 4"]
    judgements: Judgements


def read_ground_truth(path: str | pathlib.Path) -> GroundTruth:
    """Reads a file such as `gnd_roxford5k.pkl`, without running any code that it may hold.

    Raises:
        UserError: The file cannot be read, could run code, is damaged, or is of another kind.
    """
    path = pathlib.Path(path).expanduser()
    try:
        data = read_bytes(path)
    except OSError as error:
        raise UserError(f"cannot read {path} ({error.strerror or error})") from error
    return parse_ground_truth(data, str(path))


def parse_ground_truth(data: bytes, place: str) -> GroundTruth:
    """Reads the bytes of such a file, which is at a place, see `read_ground_truth`."""
    loaded = safe_pickle.loads(data, place)
    try:
        queries, gallery = (tuple(as_array(loaded[key]).tolist()) for key in ("qimlist", "imlist"))
        judged = as_array(loaded["gnd"]).tolist()
        boxes = np.array([as_array(one["bbx"]).reshape(4) for one in judged], np.float64)
        lists = {key: [as_indices(one[key]) for one in judged] for key in _JUDGED}
    except safe_pickle.UNEXPECTED as error:
        raise UserError(
            f"{place} is not a ground truth of Revisited Oxford or Paris: it needs imlist, "
            "qimlist, and gnd with bbx, easy, hard and junk for each query"
        ) from error
    problem = _problem(queries, gallery, boxes, lists)
    if problem:
        raise UserError(f"{place} is damaged: {problem}; fetch it again")
    return GroundTruth(queries, gallery, boxes, Judgements(**lists))


def _problem(
    queries: tuple[Any, ...],
    gallery: tuple[Any, ...],
    boxes: Float[np.ndarray, "judged 4"],
    lists: dict[str, list[Int[np.ndarray, " items"]]],
) -> str | None:
    """Says what contradicts the rest; None if nothing does."""
    for key, names in (("qimlist", queries), ("imlist", gallery)):
        if not names or not all(isinstance(name, str) for name in names):
            return f"{key} is not a list of names"
        if len(set(names)) < len(names):
            return f"{key} has a name twice"
    if len(boxes) != len(queries):
        return f"it judges {len(boxes)} queries but names {len(queries)}"
    for i, name in enumerate(queries):
        left, top, right, bottom = boxes[i]
        if not (np.isfinite(boxes[i]).all() and left < right and top < bottom):
            return f"the box of query {name} is {boxes[i].tolist()}"
        items = np.concatenate([lists[key][i] for key in _JUDGED])
        if len(items) and not (0 <= items.min() and items.max() < len(gallery)):
            return f"query {name} lists an image outside 0 to {len(gallery) - 1}"
        if len(np.unique(items)) < len(items):
            return f"query {name} lists an image twice"
    return None
