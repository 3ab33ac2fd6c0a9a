#!/usr/bin/env bash
# PyNNDescent's metric "dot" is the cosine.
#
# Versions: pynndescent 0.7.0, numpy 2.4.6.
#
# Source: https://pynndescent.readthedocs.io lists "dot" beside "cosine" among the metrics. The index
# normalises its vectors for both.
#
# Input: 300 vectors of 8 coordinates with lengths from 0.2 to 2, and the graph of their neighbours by
# "dot" and, as a control, by "inner_product".
#
# Expected: the neighbours with the largest inner products, as by "inner_product".
#
# Seen: by "dot", all of the 10 neighbours are those by cosine, and fewer than half of them those by
# inner products; distances are 1 − cos. "inner_product" is what it says.
#
# Why it matters: a search of inner products, to which hyperbolic distances reduce, silently becomes
# one of directions. hypjax computes neighbours itself, exactly.
#
# The script exits with 0 while this is so, and with 1 once it has changed.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet pynndescent==0.7.0 numpy==2.4.6

cat >"$work/search.py" <<'PYTHON'
import sys

import numpy as np
import pynndescent

rng = np.random.default_rng(0)
vectors = rng.normal(size=(300, 8)).astype(np.float32)
vectors *= rng.uniform(0.2, 2, size=(300, 1)) / np.linalg.norm(vectors, axis=1, keepdims=True)
vectors = vectors.astype(np.float32)
products = vectors @ vectors.T
lengths = np.linalg.norm(vectors, axis=1)
orders = {
    "inner products": np.argsort(-products, axis=1),
    "cosine": np.argsort(-products / lengths, axis=1),
}
shares = {}
for metric in ("dot", "inner_product"):
    index = pynndescent.NNDescent(vectors, metric=metric, n_neighbors=15, random_state=0)
    neighbours, distances = index.neighbor_graph
    for name, order in orders.items():
        common = [len(set(a[:10]) & set(b[:10])) / 10 for a, b in zip(neighbours, order)]
        shares[metric, name] = np.mean(common)
        print(f"{metric!r}: {shares[metric, name]:.2f} of the 10 nearest by {name}")
    product = products[0, neighbours[0, 3]]
    print(f"{metric!r}: distance {distances[0, 3]:.4f} at an inner product of {product:.4f}")
is_cosine = shares["dot", "cosine"] > 0.95 > 0.8 > shares["dot", "inner products"]
sys.exit(not (is_cosine and shares["inner_product", "inner products"] > 0.9))
PYTHON
# Without optimisation, numba compiles in half of the time.
if ! NUMBA_OPT=0 "$work/venv/bin/python" "$work/search.py"; then
  echo "this has changed"
  exit 1
fi
echo "as described: dot products are cosines"
