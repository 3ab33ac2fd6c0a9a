#!/usr/bin/env bash
# Trains a configuration once for each value of one field, each run in its own default folder, and
# prints one table. Finished runs only print their results. Further fields apply to all runs:
# launch/sweep.sh configs/inshop.py:hyp-vit objective.c 0.01 0.05 0.1 0.3 0.5 1.0 --config.seed=1
# --output=sweep.png also draws the recall against the field.
set -euo pipefail
usage() {
  echo "usage: launch/sweep.sh CONFIG FIELD VALUE... [--config.OTHER=VALUE...] [--output=FIGURE]" >&2
  echo "for example launch/sweep.sh configs/inshop.py:hyp-vit objective.c 0.05 0.1 0.3" >&2
  exit 2
}

[ $# -ge 3 ] || usage
flags=(--config="$1") field=$2 values=() output=
shift 2
for argument in "$@"; do
  case $argument in
    --config.*=*) flags+=("$argument") ;;
    --output=?*) output=$argument ;;
    -*[!0-9.e-]*) usage ;;
    *) values+=("$argument") ;;
  esac
done
[ ${#values[@]} -gt 0 ] || usage

print_table() {
  python -m hypjax.compare "${flags[@]}" --field="$field" "${values[@]/#/--value=}" "$@"
}

print_table >/dev/null # Errors are reported now, not after hours of training.
failed=0
for value in "${values[@]}"; do
  echo "== $field=$value"
  python -m hypjax.main "${flags[@]}" --config."$field=$value" || failed=$?
  [ "$failed" -lt 128 ] || exit "$failed" # An interrupt ends the whole sweep.
done
print_table ${output:+"$output"} || [ "$failed" -ne 0 ] # The status of a failed run matters more.
exit "$failed"
