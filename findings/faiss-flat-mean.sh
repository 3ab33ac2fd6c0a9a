#!/usr/bin/env bash
# A flat L2 index of faiss forgets digits from 128,000 coordinates of queries in a call on.
#
# Versions: faiss-cpu 1.15.1, numpy 2.4.6.
#
# Source: a flat index is documented as exact (https://github.com/facebookresearch/faiss/wiki).
# Calls with up to `faiss.cvar.distance_compute_blas_threshold` coordinates, 127,999, subtract
# vectors. Longer ones compute ‖x‖² + ‖y‖² − 2⟨x, y⟩ by a matrix product in float32, which rounds in
# proportion to the vectors' lengths.
#
# Input: 4,000 vectors of 64 coordinates with deviation 1 around a mean of 1,000, and 2,000 of them
# as noisy queries; and points of a hyperbolic tree, 200 parents with 100 children each, in 8
# coordinates of the unit ball, within 3e-5 of its surface.
#
# Expected: a query has the same neighbours whatever other queries come with it.
#
# Seen: one query fewer than the threshold, and all 10 neighbours of each query are found. With one
# more query, the same queries find about a quarter of theirs around the mean, and few near the
# surface of the ball.
#
# Why it matters: a service that answers single queries is right, and its evaluation, in batches, is
# wrong. Where points lie near the boundary of a ball, no mean can be subtracted. hypjax lets
# products only exclude items, and ranks the others by subtraction.
#
# The script exits with 0 while this is so, and with 1 once it has changed.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet faiss-cpu==1.15.1 numpy==2.4.6

cat >"$work/search.py" <<'PYTHON'
import sys

import faiss
import numpy as np

rng = np.random.default_rng(0)


def around_a_mean():
    """Vectors with a large mean, and queries near some of them."""
    vectors = 1000 + rng.normal(size=(4000, 64))
    return vectors, vectors[:2000] + 0.1 * rng.normal(size=(2000, 64))


def near_the_surface():
    """Children around the nodes of a tree, in float32 and 3e-5 to 1e-5 from the surface."""
    parents = rng.normal(size=(200, 8))
    children = np.repeat(parents / np.linalg.norm(parents, axis=1, keepdims=True), 100, axis=0)
    children += 3e-5 * rng.normal(size=children.shape)
    gaps = 10 ** rng.uniform(-5, -4.5, size=(len(children), 1))
    children *= (1 - gaps) / np.linalg.norm(children, axis=1, keepdims=True)
    return children, children[:16000]


def found(index, vectors, queries, checked):
    """The share of the first queries' 10 neighbours that one call finds."""
    neighbours = index.search(queries, 10)[1][checked]
    exact = vectors.astype(np.float64)
    shares = []
    for query, ids in zip(queries[checked].astype(np.float64), neighbours):
        squares = ((exact - query) ** 2).sum(axis=1)
        shares.append(np.mean(squares[ids] <= np.partition(squares, 9)[9]))
    return float(np.mean(shares))


changed = faiss.cvar.distance_compute_blas_threshold != 128_000
for make in (around_a_mean, near_the_surface):
    vectors, queries = (array.astype(np.float32) for array in make())
    index = faiss.IndexFlatL2(vectors.shape[1])
    index.add(vectors)
    most = 128_000 // vectors.shape[1]
    few, many = (found(index, vectors, queries[:n], slice(100)) for n in (most - 1, most))
    print(f"faiss {faiss.__version__}, {make.__name__}: {few:.3f}, one query more: {many:.3f}")
    changed |= few < 0.99 or many > 0.5
sys.exit(bool(changed))
PYTHON
if ! OMP_NUM_THREADS=2 "$work/venv/bin/python" "$work/search.py"; then
  echo "this has changed"
  exit 1
fi
echo "as described: longer calls of a flat index are not exact"
