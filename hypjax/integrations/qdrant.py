"""Galleries in Qdrant, a server that can shard and replicate its collections."""

import os
from collections.abc import Iterable, Sequence
from typing import Any

from qdrant_client import QdrantClient, models
from qdrant_client.common.client_exceptions import QdrantException
from qdrant_client.http.exceptions import ResponseHandlingException, UnexpectedResponse

from hypjax.errors import UserError, explained
from hypjax.galleries.search import GalleryItem
from hypjax.integrations.servers import Batch, ServerGallery, Wanted, spellings
from hypjax.retrieval import euclidean, inputs
from hypjax.retrieval.inputs import Points

_SEARCH_BATCH = 50  # Searches in one request.
_SCAN_KILOBYTES = 10_000  # Up to this size of vectors, Qdrant builds no graph: a scan is exact.


class QdrantGallery(ServerGallery):
    """A gallery in a collection of Qdrant, at qdrant://host:6333/name, or qdrant+https://."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._client, self._collection = _connect(url)

    def _create(self, dim: int) -> None:
        # A user may have created an empty collection, with other shards and replicas.
        if not self._ask("collection_exists"):
            vectors = models.VectorParams(size=dim, distance=models.Distance.EUCLID)
            graph = models.HnswConfigDiff(m=euclidean.LINKS, ef_construct=euclidean.ADDED)
            graph.full_scan_threshold = _SCAN_KILOBYTES
            self._ask("create_collection", vectors_config=vectors, hnsw_config=graph)
        kinds = models.PayloadSchemaType  # Images with equal values get more links.
        for name, kind in (("label", kinds.KEYWORD), ("shell", kinds.INTEGER)):
            self._ask("create_payload_index", field_name=name, field_schema=kind)

    def _load_facts(self) -> str | None:
        if not self._ask("collection_exists"):
            return None
        return (self._ask("get_collection").config.metadata or {}).get("hypjax", "")

    def _save_facts(self, text: str) -> None:
        self._ask("update_collection", metadata={"hypjax": text})

    def _count(self, label: str | None) -> int:
        return self._ask("count", count_filter=_filter(Wanted(label=label))).count

    def _read(self, keys: Sequence[str]) -> list[GalleryItem]:
        return _images(self._ask("retrieve", ids=keys, with_payload=True, with_vectors=True))

    def _first(self, most: int) -> list[GalleryItem]:
        return _images(self._ask("scroll", limit=most, with_payload=True, with_vectors=True)[0])

    def _add(self, batches: Iterable[Batch]) -> None:
        for batch in batches:
            points = [
                models.PointStruct(
                    id=x.key,
                    vector=x.point.tolist(),
                    payload={"id": x.path, "label": x.label, "shell": shell},
                )
                for x, shell in batch
            ]
            self._ask("upsert", points=points, wait=True)

    def _delete(self, keys: Sequence[str]) -> None:
        self._ask("delete", points_selector=list(keys), wait=True)

    def _nearest(self, centres: Points, count: int, wanted: Wanted) -> list[list[GalleryItem]]:
        params = models.SearchParams(hnsw_ef=count, exact=wanted.exact)
        filters = [_filter(wanted, x) for x in wanted.without or [""] * len(centres)]
        requests = [
            models.QueryRequest(
                query=x, filter=y, limit=count, params=params, with_payload=True, with_vector=True
            )
            for x, y in zip(centres.tolist(), filters, strict=True)
        ]
        blocks = inputs.blocks(len(requests), _SEARCH_BATCH)
        answers = (self._ask("query_batch_points", requests=requests[block]) for block in blocks)
        return [_images(answer.points) for batch in answers for answer in batch]

    def _ask(self, method: str, **kwargs: Any) -> Any:
        """Calls a method of the client; raises a `UserError` if the server refuses or is away."""
        try:
            return getattr(self._client, method)(self._collection, **kwargs)
        except UnexpectedResponse as error:
            reason = error.content.decode(errors="replace").strip()[:200]
            raise UserError(f"{self.name} refuses ({error.status_code}: {reason})") from error
        except (ResponseHandlingException, QdrantException) as error:
            raise UserError(f"{self.name} does not answer ({error})") from error


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


def _images(records: Sequence[Any]) -> list[GalleryItem]:
    return [GalleryItem(str(x.id), x.payload["id"], x.payload["label"], x.vector) for x in records]


def _filter(wanted: Wanted, without: str = "") -> models.Filter:
    """Filter for the wanted images, except one with the key `without`."""
    must: list[Any] = []
    if wanted.label is not None:
        match: Any = models.MatchAny(any=spellings(wanted.label))
        must.append(models.FieldCondition(key="label", match=match))
    if wanted.shell is not None:
        match = models.MatchValue(value=wanted.shell)
        must.append(models.FieldCondition(key="shell", match=match))
    must_not: list[Any] = [models.HasIdCondition(has_id=[without])] if without else []
    return models.Filter(must=must, must_not=must_not)
