#!/usr/bin/env bash
# Checks hypjax on a machine with an NVIDIA GPU that has never seen it, in at most 15 minutes:
# installs it into the active environment, times the training step, fine-tunes an encoder by several
# losses, kills and resumes a run, times a whole run and searches, and compares results with a CPU's.
# Writes gpu_check.json, with everything, and gpu_check.md, its tables, after each stage:
# launch/gpu_check.sh
# launch/gpu_check.sh step resume    # of the stages step, finetune, resume, job, search and parity
# PHOTOS=GroceryStoreDataset launch/gpu_check.sh finetune    # with the dataset's own files
# RECIPE=grocery.py:hyp-dinov2 WEIGHTS=dinov2.safetensors PHOTOS=... launch/gpu_check.sh finetune
# EXTRA=cuda13 OUTPUT=/tmp/h100 launch/gpu_check.sh
# EXTRA=none launch/gpu_check.sh    # where jax and the other packages are installed already
# With torch and timm installed, step compares with them. Without a GPU, or with QUICK=1, nothing is
# installed, models are tiny, and photos are synthetic. A stage that fails is recorded, and the
# others follow.
set -uo pipefail
declare -A limits=([step]=180 [finetune]=300 [resume]=220 [job]=240 [search]=120 [parity]=100)
order="step finetune resume job search parity"
chosen=$* output=$(realpath -m "${OUTPUT:-gpu_check}") scratch=$(mktemp -d) seconds=870
trap 'rm -rf "$scratch"' EXIT
trap 'kill $!; exit 130' INT TERM # timeout passes it on to what it runs.
[ -z "${PHOTOS:-}" ] || PHOTOS=$(realpath "$PHOTOS") || exit
[ -z "${WEIGHTS:-}" ] || WEIGHTS=$(realpath "$WEIGHTS") || exit
cd "$(dirname "$0")/.." || exit
for name in $chosen; do
  [[ " $order " == *" $name "* ]] || {
    echo "error: there is no stage $name; choose from $order" >&2
    exit 2
  }
done
command -v nvidia-smi >/dev/null && [ "${JAX_PLATFORMS:-}" != cpu ] || QUICK=1
export QUICK=${QUICK:-} scratch PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
if [ -z "$QUICK" ] && [ -z "${PHOTOS:-}" ]; then
  [[ " $chosen " != *" finetune "* ]] || {
    echo "error: finetune needs PHOTOS=FOLDER, the files of the Grocery Store Dataset" >&2
    exit 2
  }
  order=${order/finetune /} # Left out.
fi
chosen=${chosen:-$order}
for name in $chosen; do echo "$name takes at most ${limits[$name]} s"; done
echo "all of it takes at most $seconds s"
export XLA_PYTHON_CLIENT_PREALLOCATE=false
# A second check compiles nothing.
export JAX_COMPILATION_CACHE_DIR=${JAX_COMPILATION_CACHE_DIR:-$HOME/.cache/hypjax/compiled}

report() {
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
    if status == "75" and numbers:
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
failed = any(s["outcome"] == "failed" for s in stages)
(scratch / "failed").write_text(str(int(failed)))
PYTHON
}
# stage NAME LIMIT COMMAND...: runs a command for at most so many seconds, of those that are left, if
# it is chosen, and writes what all stages have found so far.
stage() {
  local name=$1 limit=$2 left=$((seconds - SECONDS)) started=$SECONDS status=0
  shift 2
  [[ " install device photos $chosen " == *" $name "* ]] || return 0
  if ((left < 10)); then
    echo "== $name is left out: the time is over; run it alone"
    return 0
  fi
  echo "== $name"
  # SIGTERM ends a benchmark, which then writes what it has measured, with status 75.
  timeout ${foreground:+--foreground} --preserve-status --kill-after=30 "$((left < limit ? (left > 1 ? left : 1) : limit))" \
    "$@" >"$scratch/$name.log" 2>&1 &
  wait $! || status=$?
  tail -n 30 "$scratch/$name.log"
  printf '%s\t%s\t%s\t%s\n' "$name" "$status" $((SECONDS - started)) "${*//$'\n'/ }" \
    >>"$scratch/stages.tsv"
  report >"$scratch/report"
}
benchmark() { # benchmark STAGE SUITE FLAG...
  # Otherwise its group gets the signal again, and the second one ends it at once.
  foreground=1 stage "$1" "${limits[$1]}" \
    python -m benchmarks "$2" ${QUICK:+--quick} --output="$scratch/$1.json" "${@:3}"
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
benchmark step train --repeats=5
if [[ " $chosen " == *" finetune "* ]]; then
  [ -n "$QUICK" ] || stage photos 90 python -m hypjax.prepare --dataset=grocery --manual_dir="$PHOTOS" \
    --data_dir="$scratch/data"
  benchmark finetune finetune --cache=device --config.run.data_dir="$scratch/data" \
    ${RECIPE:+--recipe="$RECIPE"} ${WEIGHTS:+--config.model.weights="$WEIGHTS"}
fi
stage resume "${limits[resume]}" bash -c resume
benchmark job job --cache=device --config.train.total_steps=20
benchmark search retrieval
benchmark parity parity --quick
cat "$scratch/report"
[ "$(cat "$scratch/failed")" = 0 ]
