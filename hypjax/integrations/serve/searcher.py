"""Answers searches with a model and a gallery, for the web application."""

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
from hypjax.galleries.search import Gallery, GalleryItem
from hypjax.geometry import layout
from hypjax.inference.model import Model
from hypjax.integrations.serve.limits import check_image

_DISK_IMAGES = 300  # Images in the disk; laying them out takes seconds.
_THUMBNAIL_SIDE = 256  # Pixels of the longer side.
_CACHED_THUMBNAILS = 2000  # In memory, about 10 kB each.
_Answer = dict[str, Any]


class Searcher:
    """Embeds images and texts, finds their neighbours, and places them in the Poincaré disk.

    `about` describes the gallery as JSON, and `thumbnail` returns an image as a JPEG file. Only
    `thumbnail` may be called by several threads at a time.
    """

    def __init__(self, model: Model, gallery: Gallery) -> None:
        self.model, self._gallery = model, gallery
        sample = gallery.sample(_DISK_IMAGES)
        if not sample:
            raise UserError("there are no images in the gallery")
        self._root = _shared_folder([item.path for item in sample])
        points = np.stack([item.point for item in sample])
        positions = layout.lay_out(points, model.space)
        self._place = functools.partial(
            layout.place_among, points=points, positions=positions, space=model.space
        )
        self.about: _Answer = {
            "images": len(gallery),
            "space": str(model.space),
            "texts": model.takes_texts,
            "classes": gallery.classes(),
            "sample": [self._describe(item) for item in sample],
        }
        _add_positions(self.about["sample"], positions)
        # A first search, for a blank image, compiles the programs that all searches run.
        blank = io.BytesIO()
        Image.new("L", (1, 1)).save(blank, "png")
        self.search(blank.getvalue(), 12, None, placed=True)
        if model.takes_texts:
            self.search("blank", 12, None, placed=True, is_text=True)
        self.thumbnail = functools.lru_cache(_CACHED_THUMBNAILS)(self._thumbnail)

    def embed(self, encoded: bytes) -> Float32[np.ndarray, " d"]:
        """Embeds an image file; refuses any other file."""
        check_image(encoded)
        embedded = self.model.gallery([encoded])
        for reason in embedded.unreadable.values():
            raise HTTPException(400, f"the image cannot be read ({reason})")
        return embedded.vectors[0]

    def search(
        self, query: bytes | str, k: int, label: str | None, placed: bool, *, is_text: bool = False
    ) -> _Answer:
        """Finds the k nearest images to an image file, or to the gallery's image with a key.

        If `is_text`, the query is a text to search for. `label` is the class of the hits, None for
        any; `placed` adds positions in the disk.
        """
        if isinstance(query, bytes):
            query_item, point = None, self.embed(query)
        elif is_text:
            query_item, point = None, self.model.embed_texts(query).vectors[0]
        else:
            query_item = self._find(query)
            point = query_item.point
        paths = [query_item.path] if query_item else None
        (neighbours,) = self._gallery.nearest(point[None], k, paths, label)
        if label is not None and not neighbours.keys:
            raise HTTPException(404, f"there is no image of the class {label!r} to find")
        distances = dict(zip(neighbours.keys, neighbours.distances, strict=True))
        # On a server, another client may have removed an image meanwhile.
        items = self._gallery.read(neighbours.keys)
        described_query = self._describe(query_item) if query_item else {}
        hits = [self._describe(item) | {"distance": distances[item.key]} for item in items]
        if placed:
            points = np.stack([point, *(item.point for item in items)])
            _add_positions([described_query, *hits], self._place(points))
        return {"query": described_query, "hits": hits}

    def _find(self, key: str) -> GalleryItem:
        if items := self._gallery.read([key]):
            return items[0]
        raise HTTPException(404, "the gallery has no image with this key")

    def _describe(self, item: GalleryItem) -> _Answer:
        """Describes an image to clients, by its path below the images' common folder."""
        is_file = os.path.isabs(item.path) or "://" in item.path
        name = os.path.basename(item.path) if is_file else item.path  # Texts hold slashes, too.
        if self._root and item.path.startswith(self._root):
            name = item.path.removeprefix(self._root)
        return {"key": item.key, "name": name, "class": item.label}

    def _thumbnail(self, key: str) -> bytes:
        path = self._find(key).path
        try:
            image = read_image(path, 3, min_side=2 * _THUMBNAIL_SIDE)
        except Exception as error:  # Moved or damaged since it was embedded.
            raise HTTPException(404, "the file of this image cannot be read") from error
        image.thumbnail((_THUMBNAIL_SIDE, _THUMBNAIL_SIDE), Image.Resampling.LANCZOS)
        file = io.BytesIO()
        image.save(file, "jpeg", quality=85)
        return file.getvalue()


def _shared_folder(paths: Sequence[str]) -> str:
    """The files' deepest common folder, ending in a slash; '' if there is none or only the root."""
    try:
        folder = os.path.commonpath([os.path.dirname(path) for path in paths])
    except ValueError:  # Only some of the paths are absolute.
        return ""
    return "" if folder == os.sep else os.path.join(folder, "")


def _add_positions(images: Sequence[_Answer], positions: layout.Positions) -> None:
    """Adds positions to described images, rounded towards the origin to stay inside the disk."""
    coordinates = np.trunc(np.stack([positions.real, positions.imag], axis=1) * 1e4) / 1e4
    for image, pair in zip(images, coordinates.tolist(), strict=True):
        image["place"] = pair
