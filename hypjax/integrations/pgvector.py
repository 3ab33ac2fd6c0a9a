"""Galleries in PostgreSQL with pgvector, as tables that other queries may join.

There is an HNSW index of all images, or one of each shell. The first export builds both kinds, and
keeps the one with which held-out queries need fewer candidates.
"""

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import psycopg
from psycopg import sql

from hypjax.errors import UserError, explained
from hypjax.galleries.embeddings import Embeddings
from hypjax.galleries.search import GalleryItem
from hypjax.integrations.servers import Batch, ServerGallery, Wanted, spellings
from hypjax.retrieval import euclidean
from hypjax.retrieval.inputs import Points

_MOST_LISTED = 1000  # Largest hnsw.ef_search; the iterative scan lists more.
_CREATE = """
CREATE EXTENSION IF NOT EXISTS vector;
CREATE TABLE IF NOT EXISTS {table} (key uuid PRIMARY KEY, id text NOT NULL, label text NOT NULL,
  point vector({dim}) NOT NULL, shell int NOT NULL);
CREATE INDEX IF NOT EXISTS {index} ON {table} (label);
"""
# Unchanged images keep their rows.
_UPSERT = """
INSERT INTO {table} AS old
SELECT * FROM unnest(%s::uuid[], %s::text[], %s::text[], %s::text[]::vector[], %s::int[])
ON CONFLICT (key) DO UPDATE
SET (label, point, shell) = (excluded.label, excluded.point, excluded.shell)
WHERE (old.label, old.point) IS DISTINCT FROM (excluded.label, excluded.point)
"""
_INDEX = f"""
CREATE INDEX IF NOT EXISTS {{index}} ON {{table}} USING hnsw (point vector_l2_ops)
WITH (m = {euclidean.LINKS}, ef_construction = {euclidean.ADDED}) {{where}}
"""
_INDEXES = """
SELECT relname, indpred IS NOT NULL FROM pg_index JOIN pg_class ON pg_class.oid = indexrelid
JOIN pg_am ON pg_am.oid = relam WHERE amname = 'hnsw' AND indrelid = to_regclass(%s)
AND (relname = %s OR starts_with(relname, %s)) -- Users may have others.
"""
_IMAGES = "SELECT key::text, id, label, point::real[] FROM {table} "
# A scan goes on after images that are left out, or were removed and are still linked.
_SETTINGS = "SET LOCAL hnsw.ef_search={count}; SET LOCAL hnsw.iterative_scan=relaxed_order"
_NEAREST = f"""
SELECT query.number, image.* FROM unnest(%(centres)s::text[]::vector[], %(without)s::uuid[])
  WITH ORDINALITY AS query (centre, without, number)
CROSS JOIN LATERAL (
  {_IMAGES} WHERE {{which}} AND key IS DISTINCT FROM query.without
    AND (%(label)s::text IS NULL OR label = ANY(%(labels)s))
  ORDER BY {{distance}} LIMIT %(count)s
) AS image
"""


class PostgresGallery(ServerGallery):
    """A gallery in a table, at postgresql://host:5432/database/table; options as in libpq's URI."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        location, mark, options = url.partition("?")
        database, _, self._table = location.rstrip("/").rpartition("/")
        if database.count("/") < 3 or not self._table:
            example = "postgresql://localhost/photos/birds"
            raise UserError(f"{url} names no database and table, as {example} does")
        self._quoted = sql.Identifier(self._table).as_string()
        self._database = database + mark + options
        self._connection: Any = None

    def _create(self, dim: int) -> None:
        self._ask(_CREATE, dim=str(dim), index=sql.Identifier(f"{self._table}_label"))

    def _load_facts(self) -> str | None:
        comment = "SELECT coalesce(obj_description(oid, 'pg_class'), '') FROM pg_class "
        rows = self._ask(comment + "WHERE oid = to_regclass(%s)", [self._quoted])
        return rows[0][0] if rows else None

    def _save_facts(self, text: str) -> None:
        self._ask("COMMENT ON TABLE {table} IS {text}", text=sql.Literal(text))

    def _count(self, label: str | None) -> int:
        query = "SELECT count(*) FROM {table} WHERE %s::text IS NULL OR label = ANY(%s)"
        return self._ask(query, [label, spellings(label or "")])[0][0]

    def _read(self, keys: Sequence[str]) -> list[GalleryItem]:
        return self._images("WHERE key = ANY(%s::uuid[])", list(keys))

    def _first(self, most: int) -> list[GalleryItem]:
        return self._images("ORDER BY key LIMIT %s", most)

    def _images(self, clause: str, parameter: Any) -> list[GalleryItem]:
        return list(itertools.starmap(GalleryItem, self._ask(_IMAGES + clause, [parameter])))

    def _add(self, batches: Iterable[Batch]) -> None:
        with self._transaction():  # A killed export changes nothing.
            kinds = self._kinds() or super()._kinds()
            for batch in batches:  # A statement may not insert equal keys.
                rows = {x.key: (*x[:3], str(x.point.tolist()), shell) for x, shell in batch}
                self._ask(_UPSERT, list(map(list, zip(*rows.values(), strict=True))))
            self._index(kinds)
        self._ask("ANALYZE {table}")

    def _index(self, kinds: set[bool]) -> None:
        """Creates missing indexes: of all images (False), of those of each shell (True)."""
        parts = {"all": ""} if False in kinds else {}
        if True in kinds:
            parts |= {f"shell_{shell}": f"WHERE shell = {shell}" for shell in self.shells}
        for name, where in parts.items():
            self._ask(_INDEX, index=sql.Identifier(f"{self._table}_{name}"), where=where)

    def _indexes(self) -> list[tuple[str, bool]]:
        """Names of the indexes, and whether each is of a shell."""
        names = f"{self._table}_all", f"{self._table}_shell_"
        return self._ask(_INDEXES, [self._quoted, *names])

    def _kinds(self) -> set[bool]:
        return {of_shell for _, of_shell in self._indexes()}

    def _tune(self, embeddings: Embeddings) -> float:
        recall = super()._tune(embeddings)
        missing = super()._kinds() - self._kinds()
        if recall < euclidean.TARGET_RECALL and missing:  # The gallery has outgrown its first kind.
            self._index(missing)
            recall = super()._tune(embeddings)
        if len(self._kinds()) > 1:  # An image shall be in one index only.
            for name, of_shell in self._indexes():
                if of_shell != self.by_shell:
                    self._ask("DROP INDEX {index}", index=sql.Identifier(name))
        return recall

    def _delete(self, keys: Sequence[str]) -> None:
        self._ask("DELETE FROM {table} WHERE key = ANY(%s::uuid[])", [list(keys)])

    def _nearest(self, centres: Points, count: int, wanted: Wanted) -> list[list[GalleryItem]]:
        which = "true" if wanted.shell is None else f"shell = {wanted.shell}"  # Chooses an index.
        distance = "point <-> query.centre"
        if wanted.exact:
            distance = f"({distance}) + 0"  # No index has this order.
        parameters = {
            "centres": list(map(str, centres.tolist())),
            "without": list(wanted.without),
            "label": wanted.label,
            "labels": spellings(wanted.label or ""),
            "count": count,
        }
        found: list[list[GalleryItem]] = [[] for _ in centres]
        with self._transaction():
            self._ask(_SETTINGS, count=str(min(count, _MOST_LISTED)))
            rows = self._ask(_NEAREST, parameters, which=which, distance=distance)
            for number, *image in rows:
                found[number - 1].append(GalleryItem(*image))
        return found

    def _ask(self, query: str, parameters: Any = None, **parts: str | sql.Composable) -> list[Any]:
        """Runs a statement, of which some parts may be named; returns its rows."""
        composed = {name: sql.SQL(x) if isinstance(x, str) else x for name, x in parts.items()}
        statement = sql.SQL(query).format(table=sql.Identifier(self._table), **composed)
        with explained(f"{self.name} refuses, or does not answer"):
            cursor = self._open().execute(statement, parameters)
            return cursor.fetchall() if cursor.description else []

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        with explained(f"{self.name} refuses, or does not answer"), self._open().transaction():
            yield

    def _open(self) -> psycopg.Connection:
        if self._connection is None or self._connection.closed:
            # Poolers, which share connections, lose prepared statements.
            self._connection = psycopg.connect(
                self._database, autocommit=True, prepare_threshold=None
            )
        return self._connection
