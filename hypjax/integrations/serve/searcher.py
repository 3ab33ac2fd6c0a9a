"""Answers searches with a model and a gallery, for the web application."""

import functools
import io
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float32, UInt8
from PIL import Image
from starlette.exceptions import HTTPException

from hypjax import parallel
from hypjax.data.photos import given_images
from hypjax.data.pixels import read_image
from hypjax.errors import UserError, reason
from hypjax.experiment import engines
from hypjax.galleries.search import Gallery, GalleryItem, Neighbours
from hypjax.geometry import layout
from hypjax.inference.model import Model
from hypjax.integrations.serve.limits import check_image

_DISK_IMAGES = 300  # Images in the disk; laying them out takes seconds.
_THUMBNAIL_SIDE = 256  # Pixels of the longer side.
# Most images that are embedded, or queries that are searched for, by one call. A search in a batch
# of 8 takes a fifth of its time alone (1.3 of 6 ms), and more would wait longer for each other.
MOST_TOGETHER = 8
_CACHED_THUMBNAILS = 2000  # In memory, about 10 kB each.
_Answer = dict[str, Any]


class Query(NamedTuple):
    """A point whose neighbours are searched for."""

    point: Float32[np.ndarray, " d"]
    item: GalleryItem | None  # The gallery's image that is the query; None for others.
    k: int
    label: str | None  # The class of the hits; None for any.
    placed: bool  # Whether to add positions in the disk.


class Searcher:
    """Embeds images and texts, finds their neighbours, and places them in the Poincaré disk.

    `about` describes the gallery as JSON, and `thumbnail` returns an image as a JPEG file. `embed`
    and `search` may each be called by one thread at a time, the other methods by several.
    """

    def __init__(self, model: Model, gallery: Gallery) -> None:
        self.model, self._gallery = model, gallery
        sample = gallery.sample(_DISK_IMAGES)
        if not sample:
            raise UserError(f"there are no {gallery.noun}s in the gallery")
        self._root = _shared_folder([item.path for item in sample])
        points = np.stack([item.point for item in sample])
        positions = layout.lay_out(points, model.space)
        self._place = functools.partial(
            layout.place_among, points=points, positions=positions, space=model.space
        )
        self.about: _Answer = {
            "images": len(gallery),
            "noun": gallery.noun,
            "space": str(model.space),
            "texts": model.takes_texts,
            "classes": gallery.classes(),
            "sample": [self._describe(item) for item in sample],
        }
        _add_positions(self.about["sample"], positions)
        self.thumbnail = functools.lru_cache(_CACHED_THUMBNAILS)(self._thumbnail)
        self._of_views = model.squashing()  # Leaves views, which are squares already, as they are.
        # On a CPU, XLA takes as long for an image in a batch as for one alone (19 ms, Lite0), so
        # batches would only be padded, and need programs that have to be compiled.
        mesh = parallel.create_mesh(devices=jax.local_devices()[:1])
        by_engine = engines.choose(model.engine, mesh) or jax.default_backend() != "cpu"
        self._most_embedded = MOST_TOGETHER if by_engine else 1
        # First searches, of each size of batches, compile the programs that all searches run.
        view = model.method.pixels.view
        shape = view.side, view.side, view.channels
        noise = np.random.default_rng(0).integers(256, size=shape, dtype=np.uint8)
        for power in range(MOST_TOGETHER.bit_length()):
            points = self.embed([noise] * 2**power)
            self.search([Query(point, None, 12, None, True) for point in points])
        if model.takes_texts:
            model.embed_texts("blank")

    def view(self, encoded: bytes) -> UInt8[np.ndarray, "side side channels"]:
        """Decodes an image file to the view that the model sees; refuses any other file."""
        check_image(encoded)
        try:
            return given_images(encoded).test_view(0, self.model.method.pixels.view)
        except UserError as error:
            cause = reason(error.__cause__ or error)
            raise HTTPException(400, f"the image cannot be read ({cause})") from error

    def embed(self, views: list[np.ndarray]) -> Float32[np.ndarray, "views d"]:
        """Embeds the views of at most `MOST_TOGETHER` images."""
        starts = range(0, len(views), size := self._most_embedded)
        return np.concatenate([self._of_views.embed(views[i : i + size]) for i in starts])

    def search(self, queries: Sequence[Query]) -> list[_Answer]:
        """Finds the nearest images to each query, by one search for equal k and class."""
        answers: dict[int, _Answer] = {}
        for k, label in {(query.k, query.label) for query in queries}:
            rows = [i for i, query in enumerate(queries) if (query.k, query.label) == (k, label)]
            points = np.stack([queries[i].point for i in rows])
            items = [queries[i].item for i in rows]
            paths = [item.path if item else "" for item in items] if any(items) else None
            found = self._gallery.nearest(points, k, paths, label)
            answers |= {i: self._answer(queries[i], x) for i, x in zip(rows, found, strict=True)}
        return [answers[i] for i in range(len(queries))]

    def _answer(self, query: Query, neighbours: Neighbours) -> _Answer:
        """Describes the hits of a query."""
        if query.label is not None and not neighbours.keys:
            raise HTTPException(
                404, f"there is no {self._gallery.noun} of the class {query.label!r} to find"
            )
        distances = dict(zip(neighbours.keys, neighbours.distances, strict=True))
        # On a server, another client may have removed an image meanwhile.
        items = self._gallery.read(neighbours.keys)
        described_query = self._describe(query.item) if query.item else {}
        hits = [self._describe(item) | {"distance": distances[item.key]} for item in items]
        if query.placed:
            points = np.stack([query.point, *(item.point for item in items)])
            _add_positions([described_query, *hits], self._place(points))
        return {"query": described_query, "hits": hits}

    def find(self, key: str) -> GalleryItem:
        """The gallery's image with a key."""
        if items := self._gallery.read([key]):
            return items[0]
        raise HTTPException(404, f"the gallery has no {self._gallery.noun} with this key")

    def _describe(self, item: GalleryItem) -> _Answer:
        """Describes an image to clients, by its path below the images' common folder."""
        is_file = os.path.isabs(item.path) or "://" in item.path
        name = os.path.basename(item.path) if is_file else item.path  # Texts hold slashes, too.
        if self._root and item.path.startswith(self._root):
            name = item.path.removeprefix(self._root)
        return {"key": item.key, "name": name, "class": item.label}

    def _thumbnail(self, key: str) -> bytes:
        path = self.find(key).path
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
