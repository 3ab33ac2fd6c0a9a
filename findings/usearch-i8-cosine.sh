#!/usr/bin/env bash
# usearch's i8 indexes of float32 vectors rank by cosine, whatever the metric.
#
# Versions: usearch 2.26.6, numpy 2.4.6.
#
# Source: https://unum-cloud.github.io/usearch/ offers `dtype="i8"` for any metric. A float32 vector
# is scaled to 127 before it is rounded, by its own length; its length is lost.
#
# Input: 1,000 vectors of 16 coordinates with lengths from 0.2 to 1, and 200 queries, searched
# exhaustively with the metrics "l2sq" and "ip" in f32, bf16 and i8. As a control, the same vectors
# as integers (100 times each coordinate).
#
# Expected: the neighbours by the metric, up to the rounding to 8 bits; or an error.
#
# Seen: with i8, 0.97 of the 10 neighbours are those by cosine, and only 0.6 (l2sq) or 0.4 (ip) those
# by the metric. f32, bf16 and integers are right.
#
# Why it matters: lengths are what a hyperbolic embedding stores its hierarchy in. A smaller index
# looks like a loss of precision that more bits or candidates would mend. The indexes that hypjax
# exports hold float32 or bfloat16, and are measured against an exact search.
#
# The script exits with 0 while this is so, and with 1 once it has changed.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet usearch==2.26.6 numpy==2.4.6

cat >"$work/search.py" <<'PYTHON'
import sys

import numpy as np
import usearch
from usearch.index import Index

rng = np.random.default_rng(0)
vectors = rng.normal(size=(1000, 16))
vectors *= rng.uniform(0.2, 1, size=(1000, 1)) / np.linalg.norm(vectors, axis=1, keepdims=True)
queries = vectors[:200] + 0.05 * rng.normal(size=(200, 16))
products = queries @ vectors.T
distances = {
    "l2sq": ((queries[:, None] - vectors) ** 2).sum(axis=2),
    "ip": -products,
    "cos": -products / np.linalg.norm(vectors, axis=1),
}
orders = {metric: np.argsort(values, axis=1)[:, :10] for metric, values in distances.items()}


def share(metric, dtype, order, scale=None):
    """The share of the 10 nearest by `order` that an exhaustive search by `metric` finds."""
    index = Index(ndim=16, metric=metric, dtype=dtype)
    kind = np.int8 if scale else np.float32
    stored, asked = (np.rint(scale * x) if scale else x for x in (vectors, queries))
    index.add(np.arange(1000), stored.astype(kind), threads=1)
    keys = index.search(asked.astype(kind), 10, exact=True, threads=1).keys.astype(int)
    return np.mean([len(set(a) & set(b)) / 10 for a, b in zip(keys, orders[order])])


changed = False
for metric in ("l2sq", "ip"):
    kinds = {"f32": ("f32", None), "bf16": ("bf16", None), "i8": ("i8", None)}
    kinds["i8, of integers"] = ("i8", 100)
    for name, (dtype, scale) in kinds.items():
        own, cosine = (share(metric, dtype, order, scale) for order in (metric, "cos"))
        shares = f"{own:.2f} by the metric, {cosine:.2f} by cosine"
        print(f"usearch {usearch.__version__}, {metric}, {name}: {shares}")
        changed |= (own < 0.9) != (name == "i8") or (cosine > 0.9) != (name == "i8")
sys.exit(bool(changed))
PYTHON
if ! "$work/venv/bin/python" "$work/search.py"; then
  echo "this has changed"
  exit 1
fi
echo "as described: i8 indexes of float32 vectors rank by cosine"
