#!/usr/bin/env bash
# One vector at the origin, added first, hides most others in the graphs of three engines.
#
# Versions: chromadb 1.5.9; duckdb 1.5.5 with the extension vss of the package duckdb-extension-vss
# 1.5.5; scalable-vs 0.5.0 (SVS); numpy 2.4.6.
#
# Source: the engines build graphs (HNSW, Vamana) whose links are kept diverse: a link is dropped if
# its end is nearer to a link that is kept. No manual speaks of vectors of zeros.
#
# Input: 1,000 random unit vectors of 128 coordinates and 50 queries like them, by Euclidean
# distances; the same where the first vector is replaced by zeros. Chroma and DuckDB have their own
# settings, SVS 64 links and windows of 128 (building) and 40 (search).
#
# Expected: the same recall of the 10 nearest. Zeros are a vector like any other.
#
# Seen: without zeros, the recall is 0.97 or more. With them, it is 0.16; of Chroma, which adds by
# several threads, 0.16 to 0.78 in three runs. The origin is nearer to each of the vectors than they are
# to each other, so links to it displace the links among them.
#
# Why it matters: an image that could not be read, a text without a known word or a class without
# images is often stored as zeros; the root of a hyperbolic hierarchy lies there. The graph that
# hypjax exports scans the images that its links do not lead to, and measures its recall.
#
# The script exits with 0 while this is so, and with 1 once it has changed.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet chromadb==1.5.9 duckdb==1.5.5 duckdb-extensions==1.5.5 \
  duckdb-extension-vss==1.5.5 scalable-vs==0.5.0 numpy==2.4.6

cat >"$work/search.py" <<'PYTHON'
import sys

import chromadb
import duckdb
import duckdb_extensions
import numpy as np
import svs
from chromadb.config import Settings


def by_chroma(vectors, queries):
    client = chromadb.EphemeralClient(Settings(anonymized_telemetry=False, allow_reset=True))
    client.reset()
    images = client.create_collection("images")
    images.add(ids=[str(i) for i in range(len(vectors))], embeddings=vectors)
    return np.array(images.query(query_embeddings=queries, include=[])["ids"], int)


def by_duckdb(vectors, queries):
    database = duckdb.connect()
    duckdb_extensions.import_extension("vss", con=database)
    database.load_extension("vss")
    kind = f"FLOAT[{vectors.shape[1]}]"
    database.execute(f"CREATE TABLE images (id INT, vector {kind})")
    arrays = {"id": np.arange(len(vectors)), "vector": list(vectors)}
    database.execute("INSERT INTO images SELECT unnest($id), unnest($vector)", arrays)
    database.execute("CREATE INDEX graph ON images USING HNSW (vector)")
    ask = f"SELECT id FROM images ORDER BY array_distance(vector, $1::{kind}) LIMIT 10"
    plan = database.execute(f"EXPLAIN {ask}", [queries[0]]).fetchall()
    assert "HNSW_INDEX_SCAN" in str(plan)
    return [[i for (i,) in database.execute(ask, [query]).fetchall()] for query in queries]


def by_svs(vectors, queries):
    parameters = svs.VamanaBuildParameters(graph_max_degree=64, window_size=128)
    index = svs.Vamana.build(parameters, vectors, svs.DistanceType.L2, num_threads=1)
    index.search_window_size = 40
    return index.search(queries, 10)[0]


rng = np.random.default_rng(0)
vectors, queries = rng.normal(size=(1000, 128)), rng.normal(size=(50, 128))
for array in (vectors, queries):
    array /= np.linalg.norm(array, axis=1, keepdims=True)
vectors, queries = vectors.astype(np.float32), queries.astype(np.float32)
with_zeros = vectors.copy()
with_zeros[0] = 0
changed = False
for search in (by_chroma, by_duckdb, by_svs):
    recalls = []
    for stored in (vectors, with_zeros):
        exact = np.argsort((stored**2).sum(axis=1) - 2 * queries @ stored.T, axis=1)[:, :10]
        found = search(stored, queries)
        recalls.append(np.mean([len({*a} & {*b}) / 10 for a, b in zip(found, exact.tolist())]))
    print(f"{search.__name__}: recall {recalls[0]:.3f}, with zeros {recalls[1]:.3f}", flush=True)
    changed |= recalls[0] < 0.95 or recalls[1] > 0.9
sys.exit(bool(changed))
PYTHON
cd "$work"
if ! OMP_NUM_THREADS=1 venv/bin/python search.py; then
  echo "this has changed"
  exit 1
fi
echo "as described: one vector of zeros hides most others"
