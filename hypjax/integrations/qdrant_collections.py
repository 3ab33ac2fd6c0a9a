"""Collections of Qdrant: on a server, and embedded in a folder.

Points are held under UUIDs, with a vector and a payload, and scored by a formula that is given as
in Qdrant's REST interface. Facts about the collection are its metadata on a server, and a file in a
folder.
"""

import contextlib
import json
import os
import pathlib
import re
import shutil
import sys
import time
import urllib.parse
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from hypjax.errors import UserError
from hypjax.retrieval.euclidean import ADDED, LINKS
from hypjax.system import console
from hypjax.system.files import checksums, sync_all, write_json
from hypjax.system.locks import claimed

SCHEMES = ("qdrant://", "qdrant+https://")
_PACKAGE = 'pip install "hypjax[qdrant]"'
_SCANNED = 10_000  # Kilobytes of vectors up to which no graph is built: a scan is exact.
_WAITS = (1, 4, 15)  # Seconds before a server that is away is asked again.
_FACTS = "hypjax.json"
_SHARD = re.compile("shard-[0-9a-f]{8}")
_HIDDEN = "."  # What readers write for a moment, the same as before, begins like this.
_BLOCK = 2**20  # Bytes of a file that are copied at once, or left out if they are all 0.


class Item(NamedTuple):
    """A point of a collection: its UUID, its vector and its payload."""

    id: str
    vector: list[float]
    payload: dict[str, Any]


Hits = list[tuple[dict[str, Any], float]]  # Payloads and scores of what a search found.


class Ask(NamedTuple):
    """A search."""

    centre: list[float]  # Where candidates are searched for, by their Euclidean distances.
    point: list[float]  # The query; `$score` in the formula is the Euclidean distance from it.
    formula: dict[str, Any]  # Score of a candidate; larger is better.
    without: str | None = None  # An item that is left out, also on the way through the graph.


def strange_answer(name: str) -> UserError:
    """The error for an answer that is none of Qdrant's."""
    return UserError(f"{name} answers as no Qdrant of version 1.16 or newer does; check what it is")


class Server:
    """A collection on a server. Each method raises a `UserError` if it is out of reach.

    The methods from `create` to `remove` change it, in the body of `changing`. `Folder` has the
    same methods.
    """

    def __init__(self, client: Any, collection: str, name: str) -> None:
        self.name, self._client, self._collection = name, client, collection

    @classmethod
    def at(cls, url: str) -> "Server":
        """The collection of a URL. The key of a server is read from QDRANT_API_KEY."""
        try:
            import qdrant_client
        except ImportError as error:
            raise UserError(f"{url} needs qdrant-client: {_PACKAGE}") from error
        try:
            parts = urllib.parse.urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise UserError(f"{url} is no address ({error})") from error
        prefix, _, collection = parts.path.strip("/").rpartition("/")
        if not host or not collection:
            raise UserError(f"{url} names no collection, as qdrant://host:6333/birds does")
        client = qdrant_client.QdrantClient(
            host=f"[{host}]" if ":" in host else host,
            port=port or 6333,
            https=parts.scheme == "qdrant+https",
            prefix=prefix or None,
            api_key=os.environ.get("QDRANT_API_KEY"),
            timeout=60,
            check_compatibility=False,  # It would warn of a server that is away.
        )
        return cls(client, collection, url)

    @property
    def absence(self) -> str:
        """What to say where `facts` finds no collection."""
        return f"there is no gallery at {self.name}"

    def facts(self) -> dict[str, Any] | None:
        """Facts that `create` or `describe` stored; None if there is no such collection."""
        if not self._ask("collection_exists", self._collection):
            return None
        found = self._ask("get_collection", self._collection)
        if not found.points_count and "hypjax" not in (found.config.metadata or {}):
            return None
        return (found.config.metadata or {}).get("hypjax", {})

    def changing(self) -> contextlib.AbstractContextManager[None]:
        """Keeps the changes of the body, which may enter it again: here, each at once."""
        return contextlib.nullcontext()

    def create(self, dim: int, facts: dict[str, Any]) -> None:
        """Creates the collection for vectors of this length."""
        from qdrant_client import models

        # An empty one may have been created with other settings before.
        if not self._ask("collection_exists", self._collection):
            vectors = models.VectorParams(size=dim, distance=models.Distance.EUCLID)
            graph = models.HnswConfigDiff(m=LINKS, ef_construct=ADDED, full_scan_threshold=_SCANNED)
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
        """Replaces the facts."""
        self._ask("update_collection", self._collection, metadata={"hypjax": facts})

    def add(self, batches: Iterable[Sequence[Item]]) -> None:
        """Adds items, or replaces those of the same id."""
        from qdrant_client import models

        for items in batches:
            points = [models.PointStruct(**item._asdict()) for item in items]
            self._ask("upsert", self._collection, points=points, wait=True)

    def remove(self, ids: Sequence[str]) -> None:
        """Removes items."""
        self._ask("delete", self._collection, points_selector=list(ids), wait=True)

    def count(self, label: str | None = None) -> int:
        """The number of items, or of those whose payload has this label."""
        from qdrant_client import models

        chosen = None
        if label is not None:
            match = models.MatchValue(value=label)
            chosen = models.Filter(must=[models.FieldCondition(key="label", match=match)])
        count = self._ask("count", self._collection, count_filter=chosen, exact=True).count
        if not 0 <= count <= sys.maxsize:
            raise strange_answer(self.name)
        return count

    def read(self, ids: Sequence[str]) -> list[Item]:
        """The items with these ids, in any order, without those that are missing."""
        options = {"with_payload": True, "with_vectors": True}
        return _items(self._ask("retrieve", self._collection, ids=list(ids), **options))

    def first(self, most: int) -> list[Item]:
        """The items of the lowest ids, at most so many."""
        options = {"with_payload": True, "with_vectors": True}
        return _items(self._ask("scroll", self._collection, limit=most, **options)[0])

    def search(
        self,
        asks: Sequence[Ask],
        k: int,
        candidates: int,
        *,
        exact: bool,
        label: str | None = None,
    ) -> list[Hits]:
        """Payloads and scores of the k best candidates of each search, best first.

        With `exact`, candidates are searched for without the graph. With a `label`, only items that
        have it are found.
        """
        from qdrant_client import models

        params = models.SearchParams(hnsw_ef=candidates, exact=exact)
        all_of_them = models.SearchParams(exact=True)  # The graph would lose some on the way.
        match = models.FieldCondition(key="label", match=models.MatchValue(value=label or ""))
        wanted = None if label is None else [match]
        requests = []
        for ask in asks:
            left_out = [models.HasIdCondition(has_id=[ask.without])] if ask.without else None
            kept = models.Filter(must=wanted, must_not=left_out) if wanted or left_out else None
            near = models.Prefetch(query=ask.centre, limit=candidates, params=params, filter=kept)
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
        import httpx
        from qdrant_client.common.client_exceptions import QdrantException
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
            except httpx.InvalidURL as error:
                raise UserError(f"{self.name} is no address ({error})") from error
            except (AssertionError, RecursionError, TypeError, ValueError) as error:
                raise strange_answer(self.name) from error
            except (exceptions.ResponseHandlingException, QdrantException) as error:
                if isinstance(getattr(error, "source", None), ValueError):
                    raise strange_answer(self.name) from error
                if wait is None:
                    raise UserError(f"{self.name} does not answer ({error})") from error
            console.warn(f"{self.name} does not answer; retrying in {wait} s")
            time.sleep(wait)
        raise AssertionError  # The last pass returns or raises.


class Folder:
    """A collection embedded in a folder, by Qdrant Edge.

    A file names the current shard, which is a sub-folder, with its facts and the checksum of all.
    A shard that was written never changes: `changing` copies it, and names the copy at the end, so
    that an interruption leaves the shard before. One process at a time does so. Who reads keeps the
    shard that it opened.
    """

    def __init__(self, path: pathlib.Path) -> None:
        try:
            import qdrant_edge
        except ImportError as error:
            raise UserError(f"a .qdrant folder needs qdrant-edge-py: {_PACKAGE}") from error
        self.name, self._path, self._edge = str(path), path, qdrant_edge
        self._shard: Any = None
        self._stored: dict[str, Any] | None = None  # What the file says.
        self._facts: dict[str, Any] | None = None  # The facts, while they change, too.
        self._draft: pathlib.Path | None = None  # The copy that is being changed.
        self._open()

    @property
    def absence(self) -> str:
        """See `Server`."""
        if self._path.exists():
            return f"{self.name} is unfinished; wait for its export to end, or export again"
        return f"there is no gallery at {self.name}"

    def facts(self) -> dict[str, Any] | None:
        """See `Server`."""
        return self._facts

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """See `Server`. What fails or is interrupted changes nothing."""
        if self._draft:
            yield
            return
        with contextlib.ExitStack() as stack:
            with self._explained("cannot write to"):
                stack.enter_context(claimed(self._path, f"exporting to {self.name}"))
            self._open()  # Another process may have changed it.
            self._draft = self._path / f"shard-{uuid.uuid4().hex[:8]}"
            try:
                if self._stored:
                    with self._explained("cannot write to"):
                        shard = self._path / self._stored["shard"]
                        hidden = shutil.ignore_patterns(f"{_HIDDEN}*")
                        shutil.copytree(shard, self._draft, ignore=hidden, copy_function=_copy)
                        self._shard = self._edge.EdgeShard.load(str(self._draft))
                yield
                with self._explained("cannot write to"):
                    self._store(self._draft)
            finally:
                self._draft = self._stored = self._facts = self._shard = None
                self._open()
                self._sweep()

    def create(self, dim: int, facts: dict[str, Any]) -> None:
        """See `Server`."""
        edge = self._edge
        vectors = edge.EdgeVectorParams(size=dim, distance=edge.Distance.Euclid)
        config = edge.EdgeConfig(
            vectors=vectors,
            hnsw_config=edge.HnswIndexConfig(LINKS, ADDED, full_scan_threshold=_SCANNED),
            optimizers=edge.EdgeOptimizersConfig(indexing_threshold=_SCANNED),
            wal_enabled=False,  # `_store` flushes.
        )
        with self._explained("cannot create"):
            self._shard = edge.EdgeShard.create(str(self._draft), config)
        self._facts = facts

    def describe(self, facts: dict[str, Any]) -> None:
        """See `Server`."""
        self._facts = facts

    def add(self, batches: Iterable[Sequence[Item]]) -> None:
        """See `Server`. The graph of what was added is built at the end."""
        for items in batches:
            points = [self._edge.Point(*item) for item in items]
            with self._explained("cannot write to"):
                self._shard.update(self._edge.UpdateOperation.upsert_points(points))
        with self._explained("cannot write to"):
            self._shard.optimize()

    def remove(self, ids: Sequence[str]) -> None:
        """See `Server`."""
        with self._explained("cannot write to"):
            self._shard.update(self._edge.UpdateOperation.delete_points(list(ids)))

    def count(self, label: str | None = None) -> int:
        """See `Server`."""
        edge, chosen = self._edge, None
        if label is not None:
            chosen = edge.Filter(must=[edge.FieldCondition("label", edge.MatchValue(label))])
        with self._explained("cannot read"):
            return self._shard.count(edge.CountRequest(exact=True, filter=chosen))

    def read(self, ids: Sequence[str]) -> list[Item]:
        """See `Server`."""
        with self._explained("cannot read"):
            return _items(self._shard.retrieve(list(ids), True, True))

    def first(self, most: int) -> list[Item]:
        """See `Server`."""
        request = self._edge.ScrollRequest(limit=most, with_payload=True, with_vector=True)
        with self._explained("cannot read"):
            return _items(self._shard.scroll(request)[0])

    def search(
        self,
        asks: Sequence[Ask],
        k: int,
        candidates: int,
        *,
        exact: bool,
        label: str | None = None,
    ) -> list[Hits]:
        """See `Server`."""
        edge = self._edge
        params = edge.SearchParams(hnsw_ef=candidates, exact=exact)
        all_of_them = edge.SearchParams(exact=True)  # The graph would lose some on the way.
        match = edge.FieldCondition("label", edge.MatchValue(label or ""))
        wanted = None if label is None else [match]
        requests = []
        for ask in asks:
            left_out = [edge.HasIdCondition({ask.without})] if ask.without else None
            kept = edge.Filter(must=wanted, must_not=left_out) if wanted or left_out else None
            query = edge.Query.Nearest(ask.centre)
            near = edge.Prefetch(candidates, query, params=params, filter=kept)
            query = edge.Query.Nearest(ask.point)
            again = edge.Prefetch(candidates, query, prefetches=[near], params=all_of_them)
            formula = edge.Formula(_expression(edge.Expression, ask.formula), defaults={})
            requests.append(
                edge.QueryRequest(k, query=formula, prefetches=[again], with_payload=True)
            )
        with self._explained("cannot search"):
            found = self._shard.query_batch(edge.QueryBatchRequest(requests))
        return [[(point.payload, point.score) for point in points] for points in found]

    def _open(self) -> None:
        """Opens the current shard, unless it is open."""
        while (stored := self._read()) != self._stored:
            try:
                shard = self._load(stored) if stored else None
            except UserError:
                if self._read() == stored:
                    raise
                continue  # Another process has replaced and removed the shard meanwhile.
            self._shard, self._stored = shard, stored
            self._facts = stored and stored["facts"]

    def _read(self) -> dict[str, Any] | None:
        """What the file says: the facts, the name of the shard, and their checksum."""
        try:
            stored = json.loads((self._path / _FACTS).read_text())
            if stored.keys() == {"facts", "shard", "checksum"} and _SHARD.fullmatch(
                stored["shard"]
            ):
                return stored
        except FileNotFoundError:
            return None
        except OSError as error:
            raise UserError(f"cannot read {self.name} ({error.strerror})") from error
        except (AttributeError, RecursionError, TypeError, ValueError):
            pass
        raise UserError(
            f"{self.name} is damaged, or was not written by this version of hypjax.embed; remove "
            "it, and export again"
        )

    def _load(self, stored: dict[str, Any]) -> Any:
        shard = self._path / stored["shard"]
        with self._explained("cannot open"):
            if _checksum(shard, stored["facts"]) == stored["checksum"]:
                return self._edge.EdgeShard.load(str(shard))
        raise UserError(f"{self.name} is damaged; remove it, and export again")

    def _store(self, shard: pathlib.Path) -> None:
        """Makes a shard the current one."""
        if self._facts is None:
            return
        self._shard.flush()
        self._shard.close()
        # The first opening shortens journals; later ones write what is there already.
        self._edge.EdgeShard.load(str(shard)).close()
        sync_all(shard)
        checksum = _checksum(shard, self._facts)
        stored = {"facts": self._facts, "shard": shard.name, "checksum": checksum}
        write_json(self._path / _FACTS, stored)

    def _sweep(self) -> None:
        """Removes all shards but the current one. Who has opened them can still read them."""
        current = self._stored and self._stored["shard"]
        for path in self._path.iterdir():
            if _SHARD.fullmatch(path.name) and path.name != current:
                shutil.rmtree(path, ignore_errors=True)

    @contextlib.contextmanager
    def _explained(self, failed: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # Qdrant Edge raises no other class.
            raise UserError(f"{failed} {self.name} ({error})") from error


Collection = Server | Folder


def _items(records: Iterable[Any]) -> list[Item]:
    return [Item(str(record.id), record.vector, record.payload) for record in records]


def _checksum(folder: pathlib.Path, facts: dict[str, Any]) -> int:
    """CRC-32 of facts, and of the names and contents of files."""
    files = []
    for root, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(_HIDDEN)]
        files += [pathlib.Path(root, name) for name in names if not name.startswith(_HIDDEN)]
    contents = {file.relative_to(folder).as_posix(): checksums(file) for file in files}
    return zlib.crc32(json.dumps([facts, contents], sort_keys=True).encode())


def _copy(source: str, target: str) -> None:
    """Copies a file and its holes, of which most files of Qdrant mainly consist."""
    with open(source, "rb") as read, open(target, "wb") as written:
        while block := read.read(_BLOCK):
            if block.count(0) < len(block):
                written.write(block)
            else:
                written.seek(len(block), os.SEEK_CUR)
        written.truncate()


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
