#!/usr/bin/env bash
# Compares variants of a configuration: chooses the settings of each on the validation images, from
# equally many; trains the chosen ones with all seeds; and prints the recall on the test classes with
# 95% intervals. Finished runs are not trained again. Further fields apply to all runs:
# launch/compare.sh --config=configs/glyphs.py --seeds=0,1,2 --variant="hyp objective.c=0.1,0.3" \
#   --variant="sph objective.temperature=0.1,0.2" --config.train.total_steps=300
set -euo pipefail
if [ $# -lt 2 ]; then
  echo 'usage: launch/compare.sh --config=FILE --variant="NAME FIELD=VALUE,VALUE..." ...' >&2
  echo '       [--seeds=0,1,2] [--config.FIELD=VALUE...]' >&2
  exit 2
fi

pending() { python -m hypjax.tune "$@" --pending; }

runs=$(pending "$@")
while [ -n "$runs" ]; do
  while read -r arguments <&3; do
    echo "== $arguments"
    eval "python -m hypjax.main $arguments"
  done 3<<<"$runs"
  runs=$(pending "$@")
done
python -m hypjax.tune "$@"
