"""A model and a gallery that answer searches."""

import functools
import io
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float32
from PIL import Image
from starlette.exceptions import HTTPException

from hypjax.data.pixels import read_image
from hypjax.errors import UserError
from hypjax.geometry import layout
from hypjax.inference.model import Model
from hypjax.integrations.serve.limits import check_image
from hypjax.retrieval.galleries import Gallery, GalleryItem, require_model

_SAMPLE = 300  # Images in the disk, whose layout takes seconds.
_SIDE = 256  # Pixels of a thumbnail's longer side.
_THUMBNAILS = 2000  # In memory, about 10 kB each.
_Answer = dict[str, Any]


class Searcher:
    """Embeds images, finds their neighbours, and places them in the Poincaré disk.

    Only `thumbnail` may be called by several threads at a time. `about` describes the gallery.
    """

    def __init__(self, model: Model, gallery: Gallery) -> None:
        require_model(gallery, model.fingerprint)
        self.model, self._gallery = model, gallery
        sample = gallery.sample(_SAMPLE)
        if not sample:
            raise UserError("there are no images in the gallery")
        self._root = _shared_folder([item.path for item in sample])
        points = np.stack([item.point for item in sample])
        positions = layout.lay_out(points, model.space)
        self._place = layout.placing_among(points, positions, model.space)
        placed = zip(sample, _pairs(positions), strict=True)
        self.about: _Answer = {
            "images": len(gallery),
            "space": str(model.space),
            "classes": gallery.classes(),
            "sample": [self._shown(item) | {"place": place} for item, place in placed],
        }
        # A first search, of a blank image, compiles what every search runs.
        image = io.BytesIO()
        Image.new("L", (1, 1)).save(image, "png")
        self.search(image.getvalue(), 12, None, placed=True)
        self.thumbnail = functools.lru_cache(_THUMBNAILS)(self._thumbnail)

    def embed(self, encoded: bytes) -> Float32[np.ndarray, " d"]:
        """Embeds an image file, or refuses another file."""
        check_image(encoded)
        embedded = self.model.gallery([encoded])
        for reason in embedded.unreadable.values():
            raise HTTPException(400, f"the image cannot be read ({reason})")
        return embedded.vectors[0]

    def search(self, query: bytes | str, k: int, label: str | None, placed: bool) -> _Answer:
        """Searches for an image file, or for an image of the gallery by its key, without itself.

        With a `label`, hits are of this class; if `placed`, they have positions in the disk.
        """
        row = self._find(query) if isinstance(query, str) else None
        point = row.point if row else self.embed(query)
        paths = [row.path] if row else None
        (neighbours,) = self._gallery.nearest(point[None], k, paths, label)
        distances = dict(zip(neighbours.keys, neighbours.distances, strict=True))
        items = self._gallery.read(neighbours.keys)  # One of a server may be gone meanwhile.
        query = self._shown(row) if row else {}
        hits = [self._shown(item) | {"distance": distances[item.key]} for item in items]
        if placed:
            pairs = _pairs(self._place(np.stack([point, *(item.point for item in items)])))
            for image, place in zip((query, *hits), pairs, strict=True):
                image["place"] = place
        match = self.model.match if neighbours.distances else None
        right = match and row and row.label and row.label == neighbours.labels[0]
        remark = match.remark(neighbours.distances[0]) if match and not right else ""
        return {"query": query, "remark": remark, "hits": hits}

    def _find(self, key: str) -> GalleryItem:
        if items := self._gallery.read([key]):
            return items[0]
        raise HTTPException(404, "the gallery has no image with this key")

    def _shown(self, item: GalleryItem) -> _Answer:
        """Describes an image to clients; its path begins below the folder that all share."""
        below = bool(self._root) and item.path.startswith(self._root)
        name = item.path[len(self._root) :] if below else os.path.basename(item.path)
        return {"key": item.key, "name": name, "class": item.label}

    def _thumbnail(self, key: str) -> bytes:
        path = self._find(key).path
        try:
            image = read_image(path, 3, least=2 * _SIDE)
        except Exception as error:  # Moved or damaged since it was embedded.
            raise HTTPException(404, "the file of this image cannot be read") from error
        image.thumbnail((_SIDE, _SIDE), Image.Resampling.LANCZOS)
        file = io.BytesIO()
        image.save(file, "jpeg", quality=85)
        return file.getvalue()


def _shared_folder(paths: Sequence[str]) -> str:
    """The common folder of files, with a slash at its end; '' if it is the root, or none."""
    try:
        shared = os.path.commonpath([os.path.dirname(path) for path in paths])
        return "" if shared == os.sep else os.path.join(shared, "")
    except ValueError:  # Some are absolute, and others are not.
        return ""


def _pairs(positions: layout.Positions) -> list[list[float]]:
    # Rounded towards the origin, to remain in the disk.
    return (np.trunc(np.stack([positions.real, positions.imag], axis=1) * 1e4) / 1e4).tolist()
