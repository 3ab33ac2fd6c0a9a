#!/usr/bin/env bash
# Checks hypjax on a machine with an NVIDIA GPU that has never seen it, in at most 15 minutes:
# installs it into the active environment, compares results with a CPU's, measures, and kills and
# resumes a run. Writes gpu_check.json, with everything, and gpu_check.md, its tables:
# launch/gpu_check.sh
# launch/gpu_check.sh parity job    # of the stages parity, train, resume, job and retrieval
# EXTRA=cuda13 OUTPUT=/tmp/h100 launch/gpu_check.sh
# EXTRA=none launch/gpu_check.sh    # where jax and the other packages are installed already
# With torch and timm installed, train compares with them. Without a GPU, or with QUICK=1, nothing is
# installed and models are tiny. A stage that fails is recorded, and the others follow.
set -uo pipefail
chosen=$* output=$(realpath -m "${OUTPUT:-gpu_check}") scratch=$(mktemp -d) seconds=870
trap 'rm -rf "$scratch"' EXIT
trap 'kill $!; exit 130' INT TERM # timeout passes it on to what it runs.
cd "$(dirname "$0")/.." || exit
for name in $chosen; do
  [[ " parity train resume job retrieval " == *" $name "* ]] || {
    echo "error: there is no stage $name; choose from parity, train, resume, job and retrieval" >&2
    exit 2
  }
done
command -v nvidia-smi >/dev/null && [ "${JAX_PLATFORMS:-}" != cpu ] || QUICK=1
export QUICK=${QUICK:-} scratch PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
export XLA_PYTHON_CLIENT_PREALLOCATE=false
# A second check compiles nothing.
export JAX_COMPILATION_CACHE_DIR=${JAX_COMPILATION_CACHE_DIR:-$HOME/.cache/hypjax/compiled}

# stage NAME LIMIT COMMAND...: runs a command for at most so many seconds, of those that are left.
stage() {
  local name=$1 limit=$2 left=$((seconds - SECONDS)) started=$SECONDS status=0
  shift 2
  [[ " install device ${chosen:-$name} " == *" $name "* ]] || return 0
  echo "== $name"
  # SIGTERM ends a benchmark, which then writes what it has measured, with status 75.
  timeout ${foreground:+--foreground} --preserve-status --kill-after=30 "$((left < limit ? (left > 1 ? left : 1) : limit))" \
    "$@" >"$scratch/$name.log" 2>&1 &
  wait $! || status=$?
  tail -n 30 "$scratch/$name.log"
  printf '%s\t%s\t%s\t%s\n' "$name" "$status" $((SECONDS - started)) "${*//$'\n'/ }" \
    >>"$scratch/stages.tsv"
}
benchmark() { # benchmark SUITE LIMIT FLAG...
  # Otherwise its group gets the signal again, and the second one ends it at once.
  foreground=1 stage "$1" "$2" python -m benchmarks "$1" ${QUICK:+--quick} --output="$scratch/$1.json" "${@:3}"
}

device() {
  python - "$scratch/device.json" <<'PYTHON' || return
import json, os, sys

import jax

from hypjax.system import machine

print(jax.devices())
with open(sys.argv[1], "w") as file:
    json.dump(machine.describe(seed=0), file)
if not os.environ["QUICK"] and jax.default_backend() != "gpu":
    sys.exit("JAX finds no GPU")
PYTHON
  [ -n "$QUICK" ] || nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
}
train() { # train NAME
  exec python -m hypjax.main --config=configs/glyphs.py --workdir="$scratch/$1" \
    --config.run.cache=device --config.train.total_steps=100 --config.run.checkpoint_every=10 \
    --config.run.report=False ${QUICK:+--config.model.depth=1 --config.train.batch_size=64}
}
# A run that is killed after a checkpoint must end like an undisturbed one.
resume() {
  (train whole) || return
  train killed &
  until [ -e "$scratch/killed/checkpoints/10" ]; do
    kill -0 $! || return
    sleep 0.05
  done
  kill -KILL $!
  wait $!
  (train killed) || return
  python - "$scratch"/{whole,killed}/results.json "$scratch/resume.json" <<'PYTHON'
import json, pathlib, sys

texts = [pathlib.Path(path).read_bytes() for path in sys.argv[1:3]]
whole, killed = (json.loads(text)["final"] for text in texts)
off = max(abs(x - killed[part][name]) for part in whole for name, x in whole[part].items())
found = {"whole": whole, "killed": killed, "bit_equal": texts[0] == texts[1], "difference": off}
pathlib.Path(sys.argv[3]).write_text(json.dumps(found))
print(f"bit-equal results: {found['bit_equal']}; largest difference of a recall: {off:.4f}")
sys.exit(off > 0.02)  # GPUs add in varying order.
PYTHON
}
export -f device train resume

EXTRA=${EXTRA:-${QUICK:+none}}
[ "$EXTRA" = none ] || stage install 200 python -m pip install -q -e ".[${EXTRA:-cuda12}]"
stage device 40 bash -c device
# With empty caches all programs of a run compile in 70 s on an H200, those of train and its peers in 60 s.
benchmark parity 100 --quick
benchmark train 180
stage resume 220 bash -c resume
benchmark job 240 --cache=device --config.train.total_steps=20
benchmark retrieval 120

python3 - "$scratch" "$output" <<'PYTHON'
import json, pathlib, sys

scratch, output = map(pathlib.Path, sys.argv[1:])
stages, lines, tables = [], [], []
for line in (scratch / "stages.tsv").read_text().splitlines():
    name, status, seconds, command = line.split("\t")
    log = (scratch / f"{name}.log").read_text(errors="replace").splitlines() or [""]
    path = scratch / f"{name}.json"
    numbers = json.loads(path.read_text()) if path.exists() else {}
    outcome = "passed" if status == "0" else "failed"
    if status == "75" and name in numbers:
        outcome = "cut short"
    if name == "parity" and not all(row["passed"] for row in numbers.get(name, [])):
        outcome = "failed"
    record = {"stage": name, "outcome": outcome, "status": int(status), "seconds": int(seconds)}
    stages.append(record | {"command": command, "end": log[-15:], "numbers": numbers})
    table = [line for line in log if line.startswith("|")]
    tables += ["", f"`{name}`:", "", *table] if table else []
    end = "see its table" if table else log[-1].replace("|", "")[:120]
    lines.append(f"| {name} | {outcome} | {seconds} | {end} |")
device = next((s["numbers"] for s in stages if s["stage"] == "device"), {})
versions = ", ".join(f"{name} {version}" for name, version in device.get("versions", {}).items())
title = f"{device.get('device', 'unknown device')}, {versions}:"
lines = [title, "", "| stage | outcome | seconds | end |", "|---|---|---|---|", *lines]
output.with_suffix(".json").write_text(json.dumps({"device": device, "stages": stages}, indent=1))
output.with_suffix(".md").write_text("\n".join([*lines, *tables, ""]))
print("\n".join(lines))
sys.exit(any(s["outcome"] == "failed" for s in stages))
PYTHON
