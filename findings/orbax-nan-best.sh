#!/usr/bin/env bash
# Orbax takes a checkpoint whose metric is NaN for the best, and deletes the best one.
#
# Versions: orbax-checkpoint 0.12.8, jax 0.10.2.
#
# Source: `CheckpointManagerOptions(max_to_keep, best_fn, best_mode)` keeps "the best" checkpoints by
# a metric (https://orbax.readthedocs.io). Steps are sorted by it, and NaN sorts nowhere.
#
# Input: metrics 0.9, 0.5 and NaN at the steps 1, 2 and 3, of which one is kept, in the modes "max"
# and "min".
#
# Expected: the best is step 1 by the largest and step 2 by the smallest metric.
#
# Seen: in both modes the best is step 3, and it is the only one on the disk.
#
# Why it matters: a run that diverges at its end, or whose score divides by zero, loses its best
# model without a message. hypjax keeps checkpoints by a policy of its own, in which NaN is no score.
#
# The script exits with 0 while this is so, and with 1 once it has changed.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet orbax-checkpoint==0.12.8 jax==0.10.2 numpy==2.4.6

cat >"$work/save.py" <<'PYTHON'
import pathlib
import sys

import numpy as np
import orbax.checkpoint as ocp

METRICS = {1: 0.9, 2: 0.5, 3: float("nan")}
seen = {}
for mode in ("max", "min"):
    options = ocp.CheckpointManagerOptions(
        max_to_keep=1, best_fn=lambda metrics: metrics["score"], best_mode=mode
    )
    with ocp.CheckpointManager(pathlib.Path(sys.argv[1]) / mode, options=options) as manager:
        for step, score in METRICS.items():
            tree = ocp.args.StandardSave({"x": np.arange(3)})
            manager.save(step, args=tree, metrics={"score": score})
            manager.wait_until_finished()
        seen[mode] = manager.best_step(), list(manager.all_steps())
    print(f"{mode}: the best step is {seen[mode][0]}, steps on the disk are {seen[mode][1]}")
if set(map(str, seen.values())) != {"(3, [3])"}:
    raise SystemExit("this has changed")
PYTHON
if ! JAX_PLATFORMS=cpu "$work/venv/bin/python" "$work/save.py" "$work" 2>"$work/log"; then
  tail -n 3 "$work/log" >&2
  exit 1
fi
echo "as described: the checkpoint with NaN counts as the best, and the best one is deleted"
