#!/usr/bin/env bash
# Runs the rows of a table of the papers, one after the other, and prints the table with our values,
# also as runs/papers/TABLE.md and .csv. The same command again resumes, and skips finished rows. A
# row that fails, as without its dataset or weights, says why, and the next one runs. Further fields
# apply to all runs:
# launch/papers.sh hyp-vit-3
# launch/papers.sh hyp-vit-2 "Hyp-DINO cub200" "Sph-DINO cub200" --config.run.data_dir=/data
set -uo pipefail
folder=runs/papers failed=()
lines=$(python -m papers "$@" --pending) || exit
mkdir -p "$folder"
while read -r line <&3; do
  echo "== $line"
  status=0
  eval "$line" 3<&- || status=$?
  # An interrupt, or a signal to make room, ends the whole table.
  [ "$status" -lt 128 ] && [ "$status" -ne 75 ] || exit "$status"
  [ "$status" -eq 0 ] || failed+=("$line")
done 3< <(printf '%s' "${lines:+$lines$'\n'}")
python -m papers "$@" --output="$folder/$1.md" || exit
[ ${#failed[@]} -eq 0 ] || { printf 'failed, for the reason above: %s\n' "${failed[@]}" >&2; exit 1; }
