#!/usr/bin/env bash
# Cosine distances of LanceDB double once a quantised index exists, so that thresholds lose rows.
#
# Versions: lancedb 0.40.0, pyarrow 26.0.1, numpy 2.4.6.
#
# Source: https://docs.lancedb.com/search/vector-search gives the cosine distance as 1 minus the
# cosine. An index normalises vectors and quantises them; its distances are squared Euclidean ones
# of unit vectors, which are 2 − 2cos. Only `refine_factor` computes those of the metric again.
#
# Input: 2,000 unit vectors of 32 coordinates, and queries near some of them: searched by cosine
# without an index, and with an index of scalars (IVF_SQ), all of whose lists are searched; the same
# rows within a threshold (`distance_range`). As a control, an index that does not quantise.
#
# Expected: distances and rows that are the same up to the error of the quantisation.
#
# Seen: all distances are twice as large. A threshold that the nearest rows keep without an index
# keeps none of them with one. With `refine_factor=1`, the returned distances are right again, but the
# threshold is still compared with the doubled ones. An index that does not quantise is right.
#
# Why it matters: a threshold, such as one for near-copies, is chosen on a small table, and the index
# comes with the millionth row: then copies are no longer found. hypjax takes candidates by L2 and
# computes distances itself.
#
# The script exits with 0 while this is so, and with 1 once it has changed.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet lancedb==0.40.0 pyarrow==26.0.1 numpy==2.4.6

cat >"$work/search.py" <<'PYTHON'
import sys
import warnings

import lancedb
import numpy as np
import pyarrow

warnings.simplefilter("ignore", DeprecationWarning)
rng = np.random.default_rng(0)
vectors = rng.normal(size=(2000, 32)).astype(np.float32)
vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
queries = vectors[:20] + 0.05 * rng.normal(size=(20, 32)).astype(np.float32)
queries /= np.linalg.norm(queries, axis=1, keepdims=True)
columns = {"id": np.arange(2000)}
columns["vector"] = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(vectors.ravel()), 32)
table = lancedb.connect(sys.argv[1]).create_table("images", pyarrow.table(columns))


def nearest(refine=None):
    """The median of returned and true distances of the nearest rows; rows below a threshold."""
    ratios, rows = [], 0
    for query in queries:
        search = table.search(query).distance_type("cosine").limit(1).nprobes(4)
        search = search.refine_factor(refine) if refine else search
        ((row, distance),) = zip(*search.to_arrow().select(["id", "_distance"]).to_pydict().values())
        true = 1 - vectors[row] @ query
        ratios.append(distance / true)
        rows += len(search.distance_range(upper_bound=1.5 * float(true)).to_arrow())
    return float(np.median(ratios)), rows


seen = {"no index": nearest()}
for kind in ("IVF_FLAT", "IVF_SQ"):
    table.create_index(metric="cosine", index_type=kind, num_partitions=4)
    seen[kind] = nearest()
seen["IVF_SQ, refined"] = nearest(refine=1)
for name, (ratio, rows) in seen.items():
    print(f"lancedb {lancedb.__version__}, {name}: distance times {ratio:.2f}, {rows} of 20 rows")
expected = {"no index": (1, 20), "IVF_FLAT": (1, 20), "IVF_SQ": (2, 0), "IVF_SQ, refined": (1, 0)}
sys.exit({name: (round(ratio, 1), rows) for name, (ratio, rows) in seen.items()} != expected)
PYTHON
if ! "$work/venv/bin/python" "$work/search.py" "$work/images.lance"; then
  echo "this has changed"
  exit 1
fi
echo "as described: cosine distances double with a quantised index"
