#!/usr/bin/env bash
# Trains a configuration with several seeds, one after the other. Finished runs only print their
# results: launch/seeds.sh configs/glyphs.py:hyp 0 1 2
set -euo pipefail
if [ $# -lt 2 ]; then
  echo "usage: launch/seeds.sh CONFIG SEED..., for example" >&2
  echo "       launch/seeds.sh configs/glyphs.py:hyp 0 1 2" >&2
  exit 2
fi
config=$1
shift
for seed in "$@"; do
  echo "== seed $seed"
  python -m hypjax.main --config="$config" --config.seed="$seed"
done
