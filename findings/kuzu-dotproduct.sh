#!/usr/bin/env bash
# Vector indexes of Kuzu with the metric "dotproduct" return the smallest inner products.
#
# Version: kuzu 0.11.3, numpy 2.4.6.
#
# Source: https://docs.kuzudb.com/extensions/vector lists the metrics cosine, l2, l2sq and
# dotproduct, and says that an index returns the nearest neighbours.
#
# Input: 300 vectors of 8 coordinates, and the 5 nearest of one of them by each metric.
#
# Expected: by dotproduct, the largest inner products, of which the query's own is one here.
#
# Seen: the column `distance` holds the inner products themselves, ascending: the five are among the
# smallest of all, and the query's own row, whose product is the largest, is not found. By the other
# metrics, it comes first.
#
# Why it matters: hyperbolic distances rank like inner products of vectors with one more coordinate
# (`search_vectors`); such an index answers with the images that are most unlike. The faiss index that
# hypjax exports is compared with an exact search.
#
# The script exits with 0 while this is so, and with 1 once it has changed.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet kuzu==0.11.3 numpy==2.4.6

cat >"$work/search.py" <<'PYTHON'
import sys

import kuzu
import numpy as np

vectors = np.random.default_rng(0).normal(size=(300, 8))
vectors[0] *= 9 / np.linalg.norm(vectors[0])  # So its product with itself is the largest.
products = vectors @ vectors[0]
database = kuzu.Connection(kuzu.Database(sys.argv[1]))
database.execute("LOAD vector")
database.execute("CREATE NODE TABLE Image(id INT64 PRIMARY KEY, vector FLOAT[8])")
add = "CREATE (:Image {id: $id, vector: CAST($vector AS FLOAT[8])})"
for i, vector in enumerate(vectors):
    database.execute(add, {"id": i, "vector": vector.tolist()})
ranks = {}  # Of the found products among all, from the largest one.
for metric in ("cosine", "l2", "l2sq", "dotproduct"):
    database.execute(f"CALL CREATE_VECTOR_INDEX('Image', '{metric}', 'vector', metric := '{metric}')")
    ask = f"CALL QUERY_VECTOR_INDEX('Image', '{metric}', $vector, 5) RETURN node.id, distance"
    rows = database.execute(f"{ask} ORDER BY distance", {"vector": vectors[0].tolist()}).get_all()
    ranks[metric] = [int(np.sum(products > products[i])) for i, _ in rows]
    shown = ", ".join(f"{distance:.2f}" for _, distance in rows)
    print(f"kuzu {kuzu.__version__}, {metric}: distances {shown}; ranks by product {ranks[metric]}")
is_first = all(ranks[metric][0] == 0 for metric in ("cosine", "l2", "l2sq"))
sys.exit(not (is_first and min(ranks["dotproduct"]) > 280))
PYTHON
if ! "$work/venv/bin/python" "$work/search.py" "$work/images.kuzu"; then
  echo "this has changed"
  exit 1
fi
echo "as described: the smallest inner products come first"
