"""Collections of Qdrant: what they have in common, and those on a server.

Points are held under UUIDs, with a vector and a payload, and scored by a formula that is given as
in Qdrant's REST interface. Facts about the collection are its metadata on a server.
"""

import contextlib
import os
import time
import urllib.parse
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from hypjax.errors import UserError
from hypjax.system import console

SCHEMES = ("qdrant://", "qdrant+https://")
PACKAGE = 'pip install "hypjax[qdrant]"'
LINKS, ADDED = 32, 256  # Links of a point in the graph, and candidates when it is added.
SCANNED = 10_000  # Kilobytes of vectors up to which no graph is built: a scan is exact.
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
    """A collection. Each method raises a `UserError` if the collection is out of reach.

    The methods from `create` to `finish` change it, in the body of `changing`.
    """

    name: str

    @property
    def absence(self) -> str:
        """What to say where `facts` finds no collection."""

    def facts(self) -> dict[str, Any] | None:
        """Facts that `create` or `describe` stored; None if there is no such collection."""

    def changing(self) -> contextlib.AbstractContextManager[None]:
        """Keeps the changes of the body. It may be entered again within the body."""

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


def strange_answer(name: str) -> UserError:
    """The error for an answer that is none of Qdrant's."""
    return UserError(f"{name} answers as no Qdrant of version 1.16 or newer does; check what it is")


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
            raise UserError(f"{url} needs qdrant-client: {PACKAGE}") from error
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

    @property
    def absence(self) -> str:
        """See `Engine`."""
        return f"there is no gallery at {self.name}"

    def facts(self) -> dict[str, Any] | None:
        """See `Engine`."""
        if not self._ask("collection_exists", self._collection):
            return None
        found = self._ask("get_collection", self._collection)
        if not found.points_count and "hypjax" not in (found.config.metadata or {}):
            return None
        return (found.config.metadata or {}).get("hypjax", {})

    def changing(self) -> contextlib.AbstractContextManager[None]:
        """See `Engine`. The server makes each change at once."""
        return contextlib.nullcontext()

    def create(self, dim: int, facts: dict[str, Any]) -> None:
        """See `Engine`. An empty collection may have been created with other settings before."""
        from qdrant_client import models

        if not self._ask("collection_exists", self._collection):
            vectors = models.VectorParams(size=dim, distance=models.Distance.EUCLID)
            graph = models.HnswConfigDiff(m=LINKS, ef_construct=ADDED, full_scan_threshold=SCANNED)
            settings = {"vectors_config": vectors, "hnsw_config": graph}
            try:
                self._ask("create_collection", self._collection, **settings)
            except UserError:  # Unless another process has created it meanwhile.
                if not self._ask("collection_exists", self._collection):
                    raise
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
        count = self._ask("count", self._collection, count_filter=chosen, exact=True).count
        if count < 0:
            raise strange_answer(self.name)
        return count

    def search(
        self, asks: Sequence[Ask], k: int, candidates: int, *, exact: bool
    ) -> list[list[tuple[dict[str, Any], float]]]:
        """See `Engine`."""
        from qdrant_client import models

        params = models.SearchParams(hnsw_ef=candidates, exact=exact)
        all_of_them = models.SearchParams(exact=True)  # The graph would lose some on the way.
        requests = []
        for ask in asks:
            near = models.Prefetch(query=ask.centre, limit=candidates, params=params)
            again = models.Prefetch(
                query=ask.point, limit=candidates, prefetch=near, params=all_of_them
            )
            formula = models.FormulaQuery.model_validate({"formula": ask.formula})
            requests.append(
                models.QueryRequest(prefetch=again, query=formula, limit=k, with_payload=True)
            )
        found = self._ask("query_batch_points", self._collection, requests=requests)
        return [[(point.payload, point.score) for point in answer.points] for answer in found]

    def _ask(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Calls the client; a server that is away is asked again, and then reported."""
        from qdrant_client.common.client_exceptions import ResourceExhaustedResponse
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
            except (AssertionError, TypeError, ValueError) as error:
                raise strange_answer(self.name) from error
            except (exceptions.ResponseHandlingException, ResourceExhaustedResponse) as error:
                if isinstance(getattr(error, "source", None), ValueError):
                    raise strange_answer(self.name) from error
                if wait is None:
                    raise UserError(f"{self.name} does not answer ({error})") from error
            console.warn(f"{self.name} does not answer; retrying in {wait} s")
            time.sleep(wait)
        raise AssertionError  # The last pass returns or raises.
