#!/usr/bin/env bash
# Trains in a Colab runtime, with runs on Google Drive. In a cell, the same in every new runtime:
#   from google.colab import drive; drive.mount("/content/drive")
#   !git clone -q <the repository's address> hypjax
#   !hypjax/launch/colab.sh --config=configs/cub.py:hyp-dino
# A T4 has 16 GB and no bfloat16. For it add --config.run.microbatch=50 (images at a time) and, from
# the first start on, --config.model.precision=float32. A runtime is taken away without a signal:
# at most run.checkpoint_every steps are lost, and what Drive has not uploaded yet.
# In a TPU runtime: !EXTRA=tpu hypjax/launch/colab.sh ...
# Datasets prepared on Drive are copied to the runtime's disk; once, in another cell:
#   !cd hypjax && python -m hypjax.prepare --dataset=cub200 \
#       --data_dir=/content/drive/MyDrive/hypjax/datasets
set -euo pipefail
drive=${DRIVE:-/content/drive/MyDrive} data=${DATA:-/content/datasets}
if [ ! -d "$drive" ]; then
  echo 'error: no Drive; first: from google.colab import drive; drive.mount("/content/drive")' >&2
  exit 1
fi
cd "$(dirname "$0")/.."

if command -v nvidia-smi >/dev/null; then
  EXTRA=${EXTRA:-cuda12}
fi
python -m pip install -q -e ".${EXTRA:+[$EXTRA]}"

mkdir -p "$drive/hypjax/runs" "$drive/hypjax/datasets" "$data"
[ -e runs ] || ln -s "$drive/hypjax/runs" runs # Where runs go by default.
cp -ru "$drive/hypjax/datasets/." "$data" # Photos read one by one from Drive are slow.
exec python -m hypjax.main --config.run.data_dir="$data" "$@"
