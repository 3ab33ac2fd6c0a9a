"""Collections of Qdrant that are embedded in a folder."""

import contextlib
import json
import os
import pathlib
import re
import shutil
import uuid
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

from hypjax.engines.qdrant_engines import ADDED, LINKS, PACKAGE, SCANNED, Ask, Item
from hypjax.errors import UserError
from hypjax.system.files import checksums, sync_all, write_json
from hypjax.system.locks import claimed

_FACTS = "hypjax.json"
_SHARD = re.compile("shard-[0-9a-f]{8}")
_HIDDEN = "."  # What readers write for a moment, the same as before, begins like this.
_BLOCK = 2**20  # Bytes of a file that are copied at once, or left out if they are all 0.


class Folder:
    """A collection embedded in a folder, by Qdrant Edge.

    A file names the current shard, which is a sub-folder, with its facts and the checksum of all.
    A shard that was written never changes: `changing` copies it, and names the copy at the end, so
    that an interruption leaves the shard before. One process at a time does so. Who reads keeps the
    shard that it opened.
    """

    def __init__(self, path: pathlib.Path) -> None:
        """Opens the folder if there is one."""
        try:
            import qdrant_edge
        except ImportError as error:
            raise UserError(f"a .qdrant folder needs qdrant-edge-py: {PACKAGE}") from error
        self.name, self._path, self._edge = str(path), path, qdrant_edge
        self._shard: Any = None
        self._stored: dict[str, Any] | None = None  # What the file says.
        self._facts: dict[str, Any] | None = None  # The same while they change.
        self._draft: pathlib.Path | None = None  # The copy that is being changed.
        self._open()

    @property
    def absence(self) -> str:
        """See `Engine`."""
        if self._path.exists():
            return f"{self.name} is unfinished; wait for its export to end, or export again"
        return f"there is no gallery at {self.name}"

    def facts(self) -> dict[str, Any] | None:
        """See `Engine`."""
        return self._facts

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """See `Engine`. What fails or is interrupted changes nothing."""
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
        """See `Engine`."""
        edge = self._edge
        vectors = edge.EdgeVectorParams(size=dim, distance=edge.Distance.Euclid)
        config = edge.EdgeConfig(
            vectors=vectors,
            hnsw_config=edge.HnswIndexConfig(LINKS, ADDED, full_scan_threshold=SCANNED),
            optimizers=edge.EdgeOptimizersConfig(indexing_threshold=SCANNED),
            wal_enabled=False,  # `_store` flushes.
        )
        with self._explained("cannot create"):
            self._shard = edge.EdgeShard.create(str(self._draft), config)
        self._facts = facts

    def describe(self, facts: dict[str, Any]) -> None:
        """See `Engine`."""
        self._facts = facts

    def add(self, items: Sequence[Item]) -> None:
        """See `Engine`."""
        points = [self._edge.Point(*item) for item in items]
        with self._explained("cannot write to"):
            self._shard.update(self._edge.UpdateOperation.upsert_points(points))

    def remove(self, ids: Sequence[str]) -> None:
        """See `Engine`."""
        with self._explained("cannot write to"):
            self._shard.update(self._edge.UpdateOperation.delete_points(list(ids)))

    def finish(self) -> None:
        """See `Engine`."""
        with self._explained("cannot write to"):
            self._shard.optimize()

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
        all_of_them = edge.SearchParams(exact=True)  # The graph would lose some on the way.
        requests = []
        for ask in asks:
            near = edge.Prefetch(candidates, edge.Query.Nearest(ask.centre), params=params)
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
