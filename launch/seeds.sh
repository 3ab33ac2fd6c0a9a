#!/usr/bin/env bash
# Trains a configuration with several seeds, one after the other, and prints the mean and the
# standard deviation. Finished runs only print their results. Further fields apply to all runs:
# launch/seeds.sh configs/glyphs.py:hyp 0 1 2 --config.objective.c=0.3
set -euo pipefail
if [ $# -lt 2 ]; then
  echo "usage: launch/seeds.sh CONFIG SEED... [--config.FIELD=VALUE...], for example" >&2
  echo "       launch/seeds.sh configs/glyphs.py:hyp 0 1 2" >&2
  exit 2
fi
exec "$(dirname "$0")/sweep.sh" "$1" seed "${@:2}"
