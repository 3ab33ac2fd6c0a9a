#!/usr/bin/env bash
# Trains in a Colab runtime and keeps runs on Google Drive. Run this cell in every new runtime:
#   from google.colab import drive; drive.mount("/content/drive")
#   !git clone -q <the repository's address> hypjax
#   !hypjax/launch/colab.sh --config=configs/cub.py:hyp-dino
# A T4 has 16 GB of memory and computes in float32: add --config.run.microbatch=100 (images at a
# time). Colab ends a runtime without a signal: you lose at most run.checkpoint_every steps, and
# whatever Drive has not uploaded yet.
# In a TPU runtime: !EXTRA=tpu hypjax/launch/colab.sh ...
# Datasets on Drive are copied to the runtime's disk. Prepare one once, in another cell:
#   !cd hypjax && python -m hypjax.prepare --dataset=cub200 \
#       --data_dir=/content/drive/MyDrive/hypjax/datasets
set -euo pipefail
drive=${DRIVE:-/content/drive/MyDrive} data=${DATA:-/content/datasets}
if [ ! -d "$drive" ]; then
  echo 'error: mount Drive first: from google.colab import drive; drive.mount("/content/drive")' >&2
  exit 1
fi
cd "$(dirname "$0")/.."

if command -v nvidia-smi >/dev/null; then
  EXTRA=${EXTRA:-cuda12}
fi
python -m pip install -q -e ".${EXTRA:+[$EXTRA]}"

mkdir -p "$drive/hypjax/runs" "$drive/hypjax/datasets" "$data"
[ -e runs ] || ln -s "$drive/hypjax/runs" runs # The default folder of runs.
cp -ru "$drive/hypjax/datasets/." "$data" # Reading single photos from Drive is slow.
exec python -m hypjax.main --config.run.data_dir="$data" "$@"
