#!/usr/bin/env bash
# Copies of one vector hide other vectors in a usearch index: they no longer find even themselves.
#
# Version: usearch 2.26.6, numpy 2.4.0.
#
# Source: https://unum-cloud.github.io/usearch/ promises approximate search by HNSW (Malkov and
# Yashunin, 2018), whose heuristic keeps links diverse. No page speaks of equal vectors.
#
# Input: 1,000 random unit vectors of 32 coordinates, added in one thread; then the first 250, or
# 500, of them replaced by copies of one vector. Only vectors that have no copy are searched.
#
# Expected: they are found as before. Copies may take places among each other's neighbours, not
# those of others.
#
# Seen: without copies, the recall of 10 neighbours, counting equal distances as found, is 1.00, and
# all vectors find themselves. With 250 copies, the recall is 0.86, and an eighth of the other vectors
# do not find themselves; with 500 copies, the recall is 0.25, and three quarters do not.
#
# Why it matters: galleries of shops hold one photograph of a product for each of its sizes, and
# placeholders such as "no picture yet". Recall measured by the ids found blames the copies, among
# which any is right; that other images cannot be reached stays unseen. One entry of the graph for
# each distinct vector mends it.
#
# The script exits with 0 while this is so, and with 1 once it has changed.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet usearch==2.26.6 numpy==2.4.0

cd "$work"
venv/bin/python - <<'PYTHON'
import numpy as np
import usearch
from usearch.index import Index


def found(copies):
    """The recall of 10 neighbours of vectors without a copy, and the share that find themselves."""
    vectors = np.random.default_rng(0).normal(size=(1000, 32)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    vectors[:copies] = vectors[0]
    index = Index(ndim=32, metric="cos", dtype="f32")
    index.add(np.arange(1000), vectors, threads=1)
    others = np.arange(copies, 1000)
    keys = index.search(vectors[others], 10, threads=1).keys.astype(int)
    distances = 1 - vectors[others] @ vectors.T
    tenth = np.sort(distances, axis=1)[:, 9:10]
    recall = (np.take_along_axis(distances, keys, axis=1) <= tenth + 1e-6).mean()
    themselves = (keys[:, 0] == others).mean()
    print(f"usearch {usearch.__version__}, {copies} copies: recall {recall:.2f}, itself {themselves:.2f}")
    return recall, themselves


(before, itself), (some, some_itself), (half, half_itself) = map(found, (0, 250, 500))
if min(before, itself) < 0.99 or max(some, some_itself) > 0.95 or max(half, half_itself) > 0.5:
    raise SystemExit("this has changed")
PYTHON
echo "as described: copies of one vector hide the others"
