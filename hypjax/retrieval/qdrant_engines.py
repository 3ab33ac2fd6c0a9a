"""Collections of Qdrant: on a server, or embedded in a folder.

Both hold points under UUIDs, with a vector and a payload, and score them by a formula that is given
as in Qdrant's REST interface. Facts about the collection are its metadata on a server, and a file
in a folder.
"""

import contextlib
import json
import os
import pathlib
import tempfile
import time
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from hypjax.errors import UserError
from hypjax.system import console
from hypjax.system.files import write_json

SCHEMES = ("qdrant://", "qdrant+https://")
_PACKAGE = 'pip install "hypjax[qdrant]"'
_FACTS = "hypjax.json"
_LINKS, _ADDED = 32, 256  # Links of a point in the graph, and candidates when it is added.
_SCANNED = 10_000  # Kilobytes of vectors up to which no graph is built: a scan is exact.
_WAITS = (1, 4, 15)  # Seconds before a server that is away is asked again.


class Item(NamedTuple):
    """A point of a collection: its UUID, its vector and its payload."""

    id: str
    vector: list[float]
    payload: dict[str, Any]


class Ask(NamedTuple):
    """A search.

    Attributes:
        centre: Where candidates are searched for, by their Euclidean distances.
        point: The query; `$score` in the formula is the Euclidean distance from it.
        formula: Score of a candidate; larger is better.
    """

    centre: list[float]
    point: list[float]
    formula: dict[str, Any]


class Engine(Protocol):
    """A collection. Each method raises a `UserError` if the collection is out of reach."""

    name: str

    def facts(self) -> dict[str, Any] | None:
        """Facts that `create` or `describe` stored; None if there is no such collection."""

    def create(self, dim: int, facts: dict[str, Any]) -> None:
        """Creates the collection for vectors of this length, unless there is an empty one."""

    def describe(self, facts: dict[str, Any]) -> None:
        """Replaces the facts."""

    def add(self, items: Sequence[Item]) -> None:
        """Adds items, or replaces those of the same id."""

    def remove(self, ids: Sequence[str]) -> None:
        """Removes items."""

    def finish(self) -> None:
        """Builds the graph of what was added, if the collection does not do so by itself."""

    def count(self, label: str | None = None) -> int:
        """The number of items, or of those whose payload has this label."""

    def search(
        self, asks: Sequence[Ask], k: int, candidates: int, *, exact: bool
    ) -> list[list[tuple[dict[str, Any], float]]]:
        """Payloads and scores of the k best candidates of each search, best first.

        With `exact`, candidates are searched for without the graph.
        """


def open_engine(location: str) -> Engine:
    """The collection at a URL, qdrant://host:6333/name or qdrant+https://…, or in a folder.

    Raises:
        UserError: The package is not installed, or the URL names no collection.
    """
    return Server.at(location) if location.startswith(SCHEMES) else Folder(pathlib.Path(location))


class Folder:
    """A collection embedded in a folder, by Qdrant Edge."""

    def __init__(self, path: pathlib.Path) -> None:
        """Opens the folder if there is one."""
        try:
            import qdrant_edge
        except ImportError as error:
            raise UserError(f"a .qdrant folder needs qdrant-edge-py: {_PACKAGE}") from error
        self.name, self._path, self._edge = str(path), path, qdrant_edge
        self._shard: Any = None
        if (path / _FACTS).exists():
            self._open()

    def facts(self) -> dict[str, Any] | None:
        """See `Engine`."""
        if not self._shard:
            return None
        with self._explained("cannot read"):
            return json.loads((self._path / _FACTS).read_text())

    def create(self, dim: int, facts: dict[str, Any]) -> None:
        """See `Engine`."""
        edge = self._edge
        vectors = edge.EdgeVectorParams(size=dim, distance=edge.Distance.Euclid)
        # `finish` flushes. A log would also lock the folder, against a second process that reads.
        config = edge.EdgeConfig(
            vectors=vectors,
            hnsw_config=edge.HnswIndexConfig(_LINKS, _ADDED, full_scan_threshold=_SCANNED),
            optimizers=edge.EdgeOptimizersConfig(indexing_threshold=_SCANNED),
            wal_enabled=False,
        )
        with (
            self._explained("cannot create"),
            tempfile.TemporaryDirectory(dir=self._path.parent, prefix=".") as folder,
        ):
            unfinished = pathlib.Path(folder) / self._path.name
            edge.EdgeShard.create(str(unfinished), config).close()
            write_json(unfinished / _FACTS, facts)
            unfinished.replace(self._path)
        self._open()

    def describe(self, facts: dict[str, Any]) -> None:
        """See `Engine`."""
        with self._explained("cannot write to"):
            write_json(self._path / _FACTS, facts)

    def add(self, items: Sequence[Item]) -> None:
        """See `Engine`."""
        points = [self._edge.Point(*item) for item in items]
        with self._explained("cannot write to"):
            self._shard.update(self._edge.UpdateOperation.upsert_points(points))

    def remove(self, ids: Sequence[str]) -> None:
        """See `Engine`."""
        with self._explained("cannot write to"):
            self._shard.update(self._edge.UpdateOperation.delete_points(list(ids)))
            self._shard.flush()

    def finish(self) -> None:
        """See `Engine`."""
        with self._explained("cannot write to"):
            self._shard.optimize()
            self._shard.flush()

    def count(self, label: str | None = None) -> int:
        """See `Engine`."""
        edge, chosen = self._edge, None
        if label is not None:
            chosen = edge.Filter(must=[edge.FieldCondition("label", edge.MatchValue(label))])
        with self._explained("cannot read"):
            return self._shard.count(edge.CountRequest(exact=True, filter=chosen))

    def search(
        self, asks: Sequence[Ask], k: int, candidates: int, *, exact: bool
    ) -> list[list[tuple[dict[str, Any], float]]]:
        """See `Engine`."""
        edge = self._edge
        params = edge.SearchParams(hnsw_ef=candidates, exact=exact)
        requests = []
        for ask in asks:
            near = edge.Prefetch(candidates, edge.Query.Nearest(ask.centre), params=params)
            again = edge.Prefetch(candidates, edge.Query.Nearest(ask.point), prefetches=[near])
            formula = edge.Formula(_expression(edge.Expression, ask.formula), defaults={})
            requests.append(
                edge.QueryRequest(k, query=formula, prefetches=[again], with_payload=True)
            )
        with self._explained("cannot search"):
            found = self._shard.query_batch(edge.QueryBatchRequest(requests))
        return [[(point.payload, point.score) for point in points] for points in found]

    def _open(self) -> None:
        with self._explained("cannot open"):
            self._shard = self._edge.EdgeShard.load(str(self._path))

    @contextlib.contextmanager
    def _explained(self, failed: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # Qdrant Edge raises no other class.
            raise UserError(f"{failed} {self.name} ({error})") from error


class Server:
    """A collection on a server."""

    def __init__(self, client: Any, collection: str, name: str) -> None:
        """Keeps a connection; see `at`."""
        self.name, self._client, self._collection = name, client, collection

    @classmethod
    def at(cls, url: str) -> "Server":
        """The collection of a URL. The key of a server is read from QDRANT_API_KEY."""
        try:
            import qdrant_client
        except ImportError as error:
            raise UserError(f"{url} needs qdrant-client: {_PACKAGE}") from error
        parts = urllib.parse.urlsplit(url)
        prefix, _, collection = parts.path.strip("/").rpartition("/")
        if not parts.hostname or not collection:
            raise UserError(f"{url} names no collection, as qdrant://host:6333/birds does")
        client = qdrant_client.QdrantClient(
            host=parts.hostname,
            port=parts.port or 6333,
            https=parts.scheme == "qdrant+https",
            prefix=prefix or None,
            api_key=os.environ.get("QDRANT_API_KEY"),
            timeout=60,
            check_compatibility=False,  # It would warn of a server that is away.
        )
        return cls(client, collection, url)

    def facts(self) -> dict[str, Any] | None:
        """See `Engine`."""
        if not self._ask("collection_exists", self._collection):
            return None
        found = self._ask("get_collection", self._collection)
        if not found.points_count and "hypjax" not in (found.config.metadata or {}):
            return None
        return (found.config.metadata or {}).get("hypjax", {})

    def create(self, dim: int, facts: dict[str, Any]) -> None:
        """See `Engine`. An empty collection may have been created with other settings before."""
        from qdrant_client import models

        if not self._ask("collection_exists", self._collection):
            vectors = models.VectorParams(size=dim, distance=models.Distance.EUCLID)
            graph = models.HnswConfigDiff(
                m=_LINKS, ef_construct=_ADDED, full_scan_threshold=_SCANNED
            )
            self._ask(
                "create_collection", self._collection, vectors_config=vectors, hnsw_config=graph
            )
        self._ask(
            "create_payload_index",
            self._collection,
            field_name="label",
            field_schema=models.PayloadSchemaType.KEYWORD,
        )
        self.describe(facts)

    def describe(self, facts: dict[str, Any]) -> None:
        """See `Engine`."""
        self._ask("update_collection", self._collection, metadata={"hypjax": facts})

    def add(self, items: Sequence[Item]) -> None:
        """See `Engine`."""
        from qdrant_client import models

        points = [
            models.PointStruct(id=item.id, vector=item.vector, payload=item.payload)
            for item in items
        ]
        self._ask("upsert", self._collection, points=points, wait=True)

    def remove(self, ids: Sequence[str]) -> None:
        """See `Engine`."""
        self._ask("delete", self._collection, points_selector=list(ids), wait=True)

    def finish(self) -> None:
        """See `Engine`."""

    def count(self, label: str | None = None) -> int:
        """See `Engine`."""
        from qdrant_client import models

        chosen = None
        if label is not None:
            match = models.MatchValue(value=label)
            chosen = models.Filter(must=[models.FieldCondition(key="label", match=match)])
        return self._ask("count", self._collection, count_filter=chosen, exact=True).count

    def search(
        self, asks: Sequence[Ask], k: int, candidates: int, *, exact: bool
    ) -> list[list[tuple[dict[str, Any], float]]]:
        """See `Engine`."""
        from qdrant_client import models

        params = models.SearchParams(hnsw_ef=candidates, exact=exact)
        requests = []
        for ask in asks:
            near = models.Prefetch(query=ask.centre, limit=candidates, params=params)
            again = models.Prefetch(query=ask.point, limit=candidates, prefetch=near)
            formula = models.FormulaQuery.model_validate({"formula": ask.formula})
            requests.append(
                models.QueryRequest(prefetch=again, query=formula, limit=k, with_payload=True)
            )
        found = self._ask("query_batch_points", self._collection, requests=requests)
        return [[(point.payload, point.score) for point in answer.points] for answer in found]

    def _ask(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Calls the client; a server that is away is asked again, and then reported."""
        from qdrant_client.http import exceptions

        call: Callable[..., Any] = getattr(self._client, method)
        for wait in (*_WAITS, None):
            try:
                return call(*args, **kwargs)
            except exceptions.UnexpectedResponse as error:
                if wait is None or (error.status_code or 500) < 500:
                    reason = error.content.decode(errors="replace").strip()[:200]
                    message = f"{self.name} refuses ({error.status_code}: {reason})"
                    raise UserError(message) from error
            except exceptions.ResponseHandlingException as error:
                if wait is None:
                    raise UserError(f"{self.name} does not answer ({error})") from error
            console.warn(f"{self.name} does not answer; retrying in {wait} s")
            time.sleep(wait)
        raise AssertionError  # The last pass returns or raises.


def _expression(kinds: Any, formula: Any) -> Any:
    """A formula of the REST interface as an expression of Qdrant Edge."""
    if isinstance(formula, str):
        return kinds.Variable(formula)
    if isinstance(formula, float):
        return kinds.Constant(formula)
    ((name, value),) = formula.items()
    make = getattr(kinds, name.capitalize())
    if isinstance(value, list):
        return make([_expression(kinds, part) for part in value])
    return make(_expression(kinds, value))
