#!/usr/bin/env bash
# Runs a command, and runs it again while it ends with status 75: its state is saved, and what ended
# it lies outside, such as a machine that was lost. For several machines without a scheduler, typed
# on each of them, with its own --process_id:
# launch/until_done.sh launch/gpus.sh --config=configs/sop.py --coordinator=HOST0:8476 \
#     --num_processes=2 --process_id=0
# Signals are not passed on: send them to the command. One that reaches this script, as Ctrl-C
# reaches both, lets the command end and does not run it again.
set -euo pipefail
if [ $# -eq 0 ]; then
  echo "usage: launch/until_done.sh COMMAND..., as in launch/until_done.sh launch/gpus.sh" >&2
  exit 2
fi
most_tries=100 pause=${PAUSE:-10} # Seconds, in which machines come back and sockets are freed.
ended=
trap 'ended=yes' INT TERM
for ((try = 1; ; try++)); do
  status=0
  "$@" || status=$?
  if [ "$status" -ne 75 ] || [ -n "$ended" ] || [ "$try" -ge "$most_tries" ]; then
    exit "$status"
  fi
  echo "status 75: again in $pause seconds" >&2
  sleep "$pause" || exit "$status" # An interrupt meanwhile.
done
