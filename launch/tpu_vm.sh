#!/usr/bin/env bash
# Trains on a Cloud TPU VM: one host, or all hosts of a pod slice. Copies this repository there,
# installs it and trains. Run it on your own machine, logged in to gcloud, preferably in tmux:
# launch/tpu_vm.sh my-tpu us-west4-a --config=configs/sop.py:hyp-dino \
#     --workdir=gs://BUCKET/runs/sop --config.run.data_dir=gs://BUCKET/datasets
# Each host copies the data from the bucket to its own disk once. A TPU that does not exist or was
# preempted is created if these variables say how; CREATE holds further flags of gcloud:
# ACCELERATOR=v5litepod-16 VERSION=v2-alpha-tpuv5-lite CREATE=--spot launch/tpu_vm.sh ...
# Ctrl-C ends this script, but not the processes on the hosts. To save their state and end them:
# launch/tpu_vm.sh my-tpu us-west4-a stop
set -euo pipefail
if [ $# -lt 3 ]; then
  echo "usage: launch/tpu_vm.sh NAME ZONE FLAG... (those of hypjax.main), or NAME ZONE stop" >&2
  exit 2
fi
name=$1 zone=$2
shift 2
most_tries=300 pause=${PAUSE:-60}
repository=$(cd "$(dirname "$0")/.." && pwd)
archive=$(mktemp)
trap 'rm -f "$archive"' EXIT

tpu() {
  gcloud compute tpus tpu-vm "$1" "$name" --zone="$zone" "${@:2}"
}

# A host that disappears does not close its connection, so ssh must probe it.
on_all_hosts() {
  tpu ssh --worker=all --ssh-flag="-o ServerAliveInterval=30" --command="$1"
}

state() {
  tpu describe --format="value(state)" || echo MISSING
}

# A preempted TPU does not come back: it is deleted and created again.
make_tpu() {
  if [ -z "${ACCELERATOR:-}" ] || [ -z "${VERSION:-}" ]; then
    echo "error: TPU $name in $zone is $1; create it, or set ACCELERATOR and VERSION" >&2
    exit 1
  fi
  [ "$1" = MISSING ] || tpu delete --quiet
  # shellcheck disable=SC2086 # CREATE may hold several flags.
  tpu create --accelerator-type="$ACCELERATOR" --version="$VERSION" ${CREATE:-}
}

# uv brings its own Python, since that of the hosts may be older than 3.11.
install() {
  tar -czf "$archive" -C "$repository" setup.cfg pyproject.toml README.md LICENSE hypjax configs
  gcloud compute tpus tpu-vm scp "$archive" "$name:hypjax.tar.gz" --zone="$zone" --worker=all
  on_all_hosts "mkdir -p hypjax && tar -xzf hypjax.tar.gz -C hypjax && \
python3 -m pip install -q --user uv && \
{ [ -d hypjax-env ] || python3 -m uv venv -q --python 3.12 hypjax-env; } && \
python3 -m uv pip install -q --python hypjax-env -e './hypjax[tpu]' gcsfs"
}

# If a connection breaks, gcloud repeats the command on that host, where the first one may still
# run. The lock then makes it exit with 75, like any process that has lost its partners.
train() {
  on_all_hosts "cd hypjax && flock -n -E 75 ../hypjax.lock \
../hypjax-env/bin/python -m hypjax.main --coordinator=auto$(printf ' %q' "$@")"
}

if [ "$*" = stop ]; then
  on_all_hosts "pkill -TERM -o -f '^[^ ]*python -m hypjax.main'"
  exit
fi
for ((try = 1; try <= most_tries; try++)); do
  current=$(state) status=0
  case $current in
    READY)
      set +e # In a condition, bash would go on after a failed installation.
      (set -e && install && train "$@")
      status=$?
      set -e
      # gcloud waits for all hosts and returns the first non-zero status in their order: 255 for a
      # broken connection, 137 for a killed process, 134 for one that JAX aborted since another was
      # lost. A 1 may be its own, for example because the TPU was preempted meanwhile.
      case $status in
        0) exit ;;
        75 | 134 | 137 | 255) ;;
        *) [ "$(state)" != READY ] || exit "$status" ;;
      esac
      ;;
    MISSING | PREEMPTED | TERMINATED) make_tpu "$current" || status=$? ;;
  esac
  echo "TPU $current, status $status: retrying in $pause seconds" >&2
  sleep "$pause"
done
exit 75
