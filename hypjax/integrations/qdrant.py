"""Galleries in Qdrant, a server that can shard and replicate its collections.

Qdrant finds candidates by Euclidean distances in a ball, as `hypjax.retrieval.euclidean` describes;
this module ranks the candidates by their exact distances.
"""

import os
import pathlib
import re
import unicodedata
import uuid
from collections.abc import Sequence
from typing import Any, Self

import jax
import numpy as np
from jaxtyping import Float, Int
from qdrant_client import QdrantClient, models
from qdrant_client.common.client_exceptions import QdrantException
from qdrant_client.http.exceptions import ResponseHandlingException, UnexpectedResponse

from hypjax.errors import UserError, explained
from hypjax.galleries.embeddings import Embeddings
from hypjax.galleries.search import ArrayGallery, GalleryItem, Neighbours
from hypjax.geometry import Space
from hypjax.geometry.registry import describe_space, space_of
from hypjax.retrieval import euclidean, inputs
from hypjax.retrieval.inputs import Points
from hypjax.system.progress import Bar

_UPLOAD_BATCH = 500  # Images to add in one request.
_SEARCH_BATCH = 50  # Searches in one request.
_CLASSES_SAMPLE = 1000  # Images whose classes `classes` lists.
_SCAN_KILOBYTES = 10_000  # Up to this size of vectors, Qdrant builds no graph: a scan is exact.
_EXACT_CANDIDATES = 1024  # Candidates in the scan that finds a sample's exact neighbours.
_UUID = re.compile("[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
# Images, and each query's k nearest among them: distances and indices, ∞ and −1 for no image.
_Results = tuple[list[Any], Float[np.ndarray, "n k"], Int[np.ndarray, "n k"]]


class QdrantGallery:
    """A gallery in a collection of Qdrant; see `hypjax.galleries.search.Gallery`."""

    space: Space  # Isometric to a ball, or the sphere.
    fingerprint: str
    model: str
    candidates: int = 64  # In a search: more candidates find more neighbours, and take longer.

    def __init__(self, url: str) -> None:
        self.name = url
        self._client, self._collection = _connect(url)

    @classmethod
    def open(cls, url: str) -> Self:
        """Opens a gallery at qdrant://host:6333/name, or qdrant+https:// with TLS."""
        gallery = cls(url)
        if not gallery._ask("collection_exists"):
            raise UserError(f"there is no gallery at {gallery.name}")
        gallery._read_facts()
        return gallery

    def __len__(self) -> int:
        return self._ask("count").count

    def has_class(self, name: str) -> bool:
        """Whether an image is of this class."""
        return self._ask("count", count_filter=_in_class(name)).count > 0

    def classes(self) -> list[str]:
        """Names of the classes of a thousand images, in order."""
        return sorted({item.label for item in self.sample(_CLASSES_SAMPLE)} - {""})

    def read(self, keys: Sequence[str]) -> list[GalleryItem]:
        """The images with these keys, in order, without unknown keys; see `point_id`."""
        keys = [key for key in keys if _UUID.fullmatch(key)]
        records = self._ask("retrieve", ids=keys, with_payload=True, with_vectors=True)
        items = {item.key: item for item in self._items(records)}
        return [items[key] for key in keys if key in items]

    def sample(self, most: int) -> list[GalleryItem]:
        """Up to `most` images, those with the lowest keys; since keys are hashes, at random."""
        records, _ = self._ask("scroll", limit=most, with_payload=True, with_vectors=True)
        return self._items(records)

    def _items(self, records: Sequence[Any]) -> list[GalleryItem]:
        points = self._points(records).astype(np.float32, copy=False)
        return [
            GalleryItem(str(record.id), record.payload["id"], record.payload["label"], point)
            for record, point in zip(records, points, strict=True)
        ]

    def _points(self, records: Sequence[Any]) -> Float[np.ndarray, "n d"]:
        """Points of the gallery's space, from the ball's points that Qdrant stores."""
        if not records:
            return np.empty((0, 1))
        return euclidean.from_ball(np.array([x.vector for x in records], np.float32), self.space)

    def nearest(
        self, points: Points, k: int, paths: Sequence[str] | None = None, label: str | None = None
    ) -> list[Neighbours]:
        """Finds the k nearest images of each query; see `Gallery.nearest`.

        If several images link to a query's file, a query may find fewer than k.
        """
        inputs.check_count(k)
        filters = [_in_class(label)] * len(points)
        images, distances, rows = self._search(points, k + (paths is not None), filters)
        results = ArrayGallery()  # Of the images found for all queries.
        results.ids = np.array([image.payload["id"] for image in images], str)
        results.labels = np.array([image.payload["label"] for image in images], str)
        # Each alone: of equal names among several, `own_rows` does not know which is which.
        own_rows = [results.own_rows([path])[0] for path in paths or [""] * len(points)]
        return [
            hits._replace(keys=[str(images[int(row)].id) for row in hits.keys])
            for hits in results.neighbours(distances, rows, own_rows, k)
        ]

    def remove(self, ids: Sequence[str]) -> None:
        """Removes the images with these paths; ignores paths that the gallery does not hold."""
        self._ask("delete", points_selector=[point_id(path) for path in ids], wait=True)

    def _prepare(self, embeddings: Embeddings) -> None:
        """Creates the collection if needed, and reads its facts, or writes them if it is empty."""
        euclidean.curvature(embeddings.space)  # Checks the space.
        # A user may have created an empty collection, with other shards and replicas.
        if not self._ask("collection_exists"):
            size = embeddings.vectors.shape[1]
            vectors = models.VectorParams(size=size, distance=models.Distance.EUCLID)
            graph = models.HnswConfigDiff(m=euclidean.LINKS, ef_construct=euclidean.ADDED)
            graph.full_scan_threshold = _SCAN_KILOBYTES
            self._ask("create_collection", vectors_config=vectors, hnsw_config=graph)
        if len(self):
            self._read_facts()
            return
        kind = models.PayloadSchemaType.KEYWORD
        self._ask("create_payload_index", field_name="label", field_schema=kind)
        self.space, self.model = embeddings.space, embeddings.model
        self.fingerprint = embeddings.fingerprint
        self._write_facts()

    def _upsert(self, embeddings: Embeddings) -> None:
        """Adds images, or replaces those with equal paths."""
        if embeddings.fingerprint != self.fingerprint:
            raise UserError(f"{self.name} holds images of another model; name another collection")
        vectors = euclidean.in_ball(embeddings.vectors, embeddings.space).astype(np.float32)
        blocks = inputs.blocks(len(embeddings), _UPLOAD_BATCH)
        for block in Bar(blocks, unit=f" {_UPLOAD_BATCH} images", disable=None):
            paths, labels = embeddings.ids[block].tolist(), embeddings.labels[block].tolist()
            batch = models.Batch(
                ids=[point_id(path) for path in paths],
                vectors=vectors[block].tolist(),
                payloads=[{"id": x, "label": y} for x, y in zip(paths, labels, strict=True)],
            )
            self._ask("upsert", points=batch, wait=True)

    def _tune(self, embeddings: Embeddings) -> float:
        """Sets and saves the number of candidates, and returns the recall of searches with it.

        Takes the smallest number with which searches for a sample find 98% of the 10 nearest. Each
        search leaves out only its query's image. If the whole sample were left out, the graph could
        not reach images that are linked only through it, at any number of candidates.
        """
        sample_rows, _ = euclidean.sample_queries(len(embeddings), len(self))
        if not len(sample_rows):
            return 1.0
        sample, ids = embeddings.vectors[sample_rows], map(point_id, embeddings.ids[sample_rows])
        filters = [models.Filter(must_not=[models.HasIdCondition(has_id=[x])]) for x in ids]
        k = min(euclidean.NEAREST, len(self) - 1)

        def search_sample(candidates: int, exact: bool = False) -> tuple[np.ndarray, np.ndarray]:
            self.candidates = candidates
            images, distances, rows = self._search(sample, k, filters, exact)
            keys = np.array([image.id for image in images] + [""])  # Row −1 is no image.
            return distances, keys[rows]

        recall = euclidean.tune(search_sample, search_sample(_EXACT_CANDIDATES, exact=True))
        self._write_facts()
        return recall

    def _search(
        self, points: Points, k: int, filters: Sequence[models.Filter], exact: bool = False
    ) -> _Results:
        """Finds the k nearest of the images that pass each query's filter, see `_candidates`."""
        points = np.asarray(points, np.float32)
        self.space.check(points)
        ball_points = euclidean.in_ball(points, self.space).astype(np.float32)
        centres = ball_points
        # In a ball, a second search follows, see `hypjax.retrieval.euclidean`.
        for _ in range(1 if self.space.ball() is None else 2):
            answers = self._candidates(centres, max(self.candidates, 5 * k), filters, exact)
            queries = np.repeat(np.arange(len(points)), [len(answer) for answer in answers])
            images = list({image.id: image for answer in answers for image in answer}.values())
            row_of = {image.id: row for row, image in enumerate(images)}
            rows = np.array([row_of[image.id] for answer in answers for image in answer], int)
            stored = self._points(images)
            separations, rows = euclidean.rank(points, stored, queries, rows, k=k, space=self.space)
            farthest = np.where(np.isfinite(separations), separations, 0).max(axis=1, initial=0)
            centres = euclidean.centres(ball_points, farthest, self.space)
        with jax.enable_x64(True):
            return images, np.asarray(self.space.distance_at(separations)), rows

    def _candidates(
        self, centres: Points, count: int, filters: Sequence[models.Filter], exact: bool
    ) -> list[list[models.ScoredPoint]]:
        """The images that pass each centre's filter and are nearest to it in Euclidean distance.

        `exact` scans all points instead of searching the graph.
        """
        params = models.SearchParams(hnsw_ef=count, exact=exact)
        requests = [
            models.QueryRequest(
                query=x, filter=y, limit=count, params=params, with_payload=True, with_vector=True
            )
            for x, y in zip(centres.tolist(), filters, strict=True)
        ]
        blocks = inputs.blocks(len(requests), _SEARCH_BATCH)
        answers = (self._ask("query_batch_points", requests=requests[block]) for block in blocks)
        return [answer.points for batch in answers for answer in batch]

    def _read_facts(self) -> None:
        try:
            facts = self._ask("get_collection").config.metadata["hypjax"]
            self.space, self.fingerprint = space_of(facts["space"]), facts["fingerprint"]
            self.candidates, self.model = facts["candidates"], facts["model"]
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"{self.name} was not written by hypjax.embed") from error

    def _write_facts(self) -> None:
        facts = {name: getattr(self, name) for name in ("fingerprint", "model", "candidates")}
        facts["space"] = describe_space(self.space)
        self._ask("update_collection", metadata={"hypjax": facts})

    def _ask(self, method: str, **kwargs: Any) -> Any:
        """Calls a method of the client; raises a `UserError` if the server refuses or is away."""
        try:
            return getattr(self._client, method)(self._collection, **kwargs)
        except UnexpectedResponse as error:
            reason = error.content.decode(errors="replace").strip()[:200]
            raise UserError(f"{self.name} refuses ({error.status_code}: {reason})") from error
        except (ResponseHandlingException, QdrantException) as error:
            raise UserError(f"{self.name} does not answer ({error})") from error


def export_qdrant(embeddings: Embeddings, path: pathlib.Path, url: str) -> str:
    """Adds images to a gallery at a URL, and creates the gallery if needed.

    Replaces images with equal paths. Returns a sentence with the gallery's name and its recall.
    """
    del path  # The server holds the gallery.
    gallery = QdrantGallery(url)
    gallery._prepare(embeddings)
    gallery._upsert(embeddings)
    recall = f"{gallery._tune(embeddings):.1%} of the {euclidean.NEAREST} nearest neighbours"
    return f"{gallery.name}, which now holds {len(gallery)} images; it finds {recall}"


def point_id(path: str) -> str:
    """A UUID made from an image's path, so that adding the image again replaces it."""
    return str(uuid.uuid5(uuid.NAMESPACE_URL, f"file:{path}"))


def _connect(url: str) -> tuple[QdrantClient, str]:
    """A client of the server, and the name of the collection."""
    scheme, _, rest = url.partition("://")
    server, _, collection = rest.rstrip("/").rpartition("/")
    if not server or not collection:
        raise UserError(f"{url} names no collection, as qdrant://host:6333/birds does")
    with explained(f"{url} is no address"):
        client = QdrantClient(
            f"{'https' if scheme == 'qdrant+https' else 'http'}://{server}",
            api_key=os.environ.get("QDRANT_API_KEY"),
            timeout=60,
            check_compatibility=False,  # The check would warn if the server is away.
        )
    return client, collection


def _in_class(label: str | None) -> models.Filter:
    """Filter for images of a class, or for all images."""
    if label is None:
        return models.Filter()
    spellings = [label, *(unicodedata.normalize(form, label) for form in ("NFC", "NFD"))]
    match = models.MatchAny(any=spellings)
    return models.Filter(must=[models.FieldCondition(key="label", match=match)])
