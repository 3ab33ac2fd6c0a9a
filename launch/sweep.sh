#!/usr/bin/env bash
# Trains a configuration once for each value of one field, each in its own default folder, and
# prints one table; finished runs only print their results. What sets other fields is for all runs:
# launch/sweep.sh configs/inshop.py:hyp-vit objective.c 0.01 0.05 0.1 0.3 0.5 1.0 --config.seed=1
set -euo pipefail
usage() {
  echo "usage: launch/sweep.sh CONFIG FIELD VALUE... [--config.OTHER=VALUE...], as in" >&2
  echo "       launch/sweep.sh configs/inshop.py:hyp-vit objective.c 0.05 0.1 0.3" >&2
  exit 2
}

[ $# -ge 3 ] || usage
flags=(--config="$1") field=$2 values=()
shift 2
for argument in "$@"; do
  case $argument in
    --config.*=*) flags+=("$argument") ;;
    -*[!0-9.e-]*) usage ;;
    *) values+=("$argument") ;;
  esac
done
[ ${#values[@]} -gt 0 ] || usage

# The table of what is finished; it also refuses values that the field cannot have.
table() {
  python - "$field" "${#values[@]}" "${values[@]}" "${flags[@]}" <<'END_OF_PYTHON'
import json
import pathlib
import sys

from hypjax import config_files, errors, reporting
from hypjax.config import default_workdir

field, count, *rest = sys.argv[1:]
values, flags = rest[: int(count)], rest[int(count) :]
spec, others = flags[0].removeprefix("--config="), [f.removeprefix("--config.") for f in flags[1:]]
recalls = {}
with errors.reported():
    unchanged = config_files.read(spec)
    for value in values:
        config = config_files.load(spec, [*others, f"{field}={value}"])
        path = pathlib.Path(default_workdir(config, unchanged)) / "results.json"
        if path.is_file():
            results = json.loads(path.read_text())
            recalls[value] = results.get("best", results["final"])
if recalls:
    print(f"{field}, recall on the test classes:\n{reporting.format_results(recalls)}")
END_OF_PYTHON
}

table >/dev/null # Rather now than after hours of training.
failed=0
for value in "${values[@]}"; do
  echo "== $field=$value"
  python -m hypjax.main "${flags[@]}" --config."$field=$value" || failed=$?
  [ "$failed" -lt 128 ] || exit "$failed" # An interrupt is meant for all.
done
table
exit "$failed"
