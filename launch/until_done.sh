#!/usr/bin/env bash
# Repeats a command as long as it exits with status 75 or 134: its state is saved, and the cause was
# external, such as a lost machine, after which JAX aborts the other processes with 134. For several
# machines without a scheduler, run it on each of them with a different --process_id:
# launch/until_done.sh launch/gpus.sh --config=configs/sop.py --coordinator=HOST0:8476 \
#     --num_processes=2 --process_id=0
# Send signals to the command; this script does not pass them on. After a signal of its own (Ctrl-C
# reaches both), it waits for the command to end and does not repeat it.
set -euo pipefail
if [ $# -eq 0 ]; then
  echo "usage: launch/until_done.sh COMMAND..., for example launch/until_done.sh launch/gpus.sh" >&2
  exit 2
fi
most_tries=100 pause=${PAUSE:-10} # Seconds for machines to return and sockets to be freed.
ended=
trap 'ended=yes' INT TERM
for ((try = 1; ; try++)); do
  status=0
  "$@" || status=$?
  case $status in
    75 | 134) ;;
    *) exit "$status" ;;
  esac
  if [ -n "$ended" ] || [ "$try" -ge "$most_tries" ]; then
    exit "$status"
  fi
  echo "status $status: retrying in $pause seconds" >&2
  sleep "$pause" || exit "$status" # Interrupted while waiting.
done
