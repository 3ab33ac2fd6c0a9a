#!/usr/bin/env bash
# Batches of Grain's DataLoader depend on the number of workers.
#
# Versions: grain 0.2.18, numpy 2.4.6.
#
# Source: `grain.DataLoader(..., operations=[grain.Batch(n)], worker_count=w)`, as in Grain's
# tutorial of the DataLoader (https://google-grain.readthedocs.io). Each worker reads every w-th row
# and applies the operations to its own rows.
#
# Input: the rows 0 to 15 in order, in batches of 4, by 0 and by 2 workers.
#
# Expected: the same batches, sooner.
#
# Seen: 0 workers deliver 0 1 2 3 first; 2 workers deliver 0 2 4 6 and then 1 3 5 7.
#
# Why it matters: in metric learning the rows of a batch are each other's negatives, and a sampler
# that puts images of one class side by side loses its pairs. A run with another number of workers is
# another experiment. hypjax gives each worker whole batches, which do not depend on their number.
#
# The script exits with 0 while this is so, and with 1 once it has changed.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet grain==0.2.18 numpy==2.4.6

cat >"$work/batches.py" <<'PYTHON'
import sys

import grain.python as grain
from absl import flags


class Rows:
    """Rows that are their own numbers."""

    def __len__(self):
        return 16

    def __getitem__(self, row):
        return row


def batches(workers):
    loader = grain.DataLoader(
        data_source=Rows(),
        sampler=grain.SequentialSampler(16, grain.NoSharding()),
        operations=[grain.Batch(4)],
        worker_count=workers,
    )
    return [batch.tolist() for batch in loader]


if __name__ == "__main__":
    flags.FLAGS(sys.argv)
    seen = {workers: batches(workers) for workers in (0, 2)}
    for workers, delivered in seen.items():
        print(f"{workers} workers: {delivered}")
    if seen[0][0] != [0, 1, 2, 3] or seen[2][:2] != [[0, 2, 4, 6], [1, 3, 5, 7]]:
        raise SystemExit("this has changed")
PYTHON
"$work/venv/bin/python" "$work/batches.py"
echo "as described: each worker batches its own rows"
