#!/usr/bin/env bash
# voyager stores and searches other numbers for arrays of NumPy that are not in C order.
#
# Versions: voyager 2.2.3, numpy 2.4.6.
#
# Source: https://spotify.github.io/voyager/python/reference.html takes any array of two axes in
# `add_items` and `query`. The library reads memory from an array's address on, without its strides.
#
# Input: 500 vectors of 8 coordinates in C order, in Fortran order, as the first 8 columns of a wider
# array, and as every second row of a longer one; the same as queries of an index that was filled in
# C order.
#
# Expected: the arrays' values, or an error.
#
# Seen: only the array in C order is stored as it is, and only it finds its own rows. The others are
# stored as other numbers and find rows at random, without a word.
#
# Why it matters: the first coordinates of an embedding (`vectors[:, :64]`), a transpose, or a column
# of a table are such arrays. In `safetensors-strides.sh`, files are written so. hypjax copies arrays
# to C order before any library sees them.
#
# The script exits with 0 while this is so, and with 1 once it has changed.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet voyager==2.2.3 numpy==2.4.6

cat >"$work/search.py" <<'PYTHON'
import sys

import numpy as np
import voyager

vectors = np.random.default_rng(0).normal(size=(500, 8)).astype(np.float32)
layouts = {
    "C order": vectors,
    "Fortran order": np.asfortranarray(vectors),
    "columns of a wider array": np.tile(vectors, 2)[:, :8],
    "every second row": np.repeat(vectors, 2, axis=0)[::2],
}
filled = voyager.Index(voyager.Space.Euclidean, num_dimensions=8)
filled.add_items(vectors)
changed = False
for name, array in layouts.items():
    assert np.array_equal(array, vectors)
    index = voyager.Index(voyager.Space.Euclidean, num_dimensions=8)
    stored = index.get_vectors(index.add_items(array))
    is_stored = np.array_equal(stored, vectors)
    own = np.mean(filled.query(array, k=1)[0][:, 0] == np.arange(500))
    print(f"{name}: {'same' if is_stored else 'other'} numbers, {own:.3f} find their own row")
    changed |= (is_stored, own > 0.95) != ((name == "C order"),) * 2
sys.exit(bool(changed))
PYTHON
if ! "$work/venv/bin/python" "$work/search.py"; then
  echo "this has changed"
  exit 1
fi
echo "as described: arrays that are not in C order are stored as other numbers"
