#!/usr/bin/env bash
# Trains on nodes of a Slurm cluster, one task per GPU. From the repository's folder, in the
# environment that has hypjax, both on a disk that all nodes see, as the data must be:
# sbatch launch/slurm.sh --config=configs/sop.py --config.run.data_dir=/shared/datasets
# When its time is up, or when it is preempted, the job saves, queues itself again, and goes on.
# scancel --signal=TERM JOB saves and queues again too; scancel JOB ends it. Options before the
# script's name go before these: sbatch --nodes=4 launch/slurm.sh ...
#SBATCH --job-name=hypjax
#SBATCH --nodes=2
# JAX gives a node's first task the first GPU that it sees, the second task the second, and so on:
# as many tasks as GPUs, each of which sees all. --gpus-per-task would show each task but one.
#SBATCH --ntasks-per-node=4
#SBATCH --gres=gpu:4
#SBATCH --cpus-per-task=8
#SBATCH --time=12:00:00
# SIGTERM for the tasks, not for this script, in time for one step and one save. Slurm may send it
# up to a minute early.
#SBATCH --signal=TERM@120
# Also after the failure of a node.
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail
most_restarts=100
# Else JAX trains on the CPU where its CUDA packages are missing.
export JAX_PLATFORMS=${JAX_PLATFORMS:-cuda,cpu}

# Slurm signals this script only where it ends the whole job: cancelled, over time, or preempted
# without grace, after which it queues the job again by itself if that is its way. srun is then
# signalled too, and kills the tasks: the run goes on from its last checkpoint.
ended=
trap 'ended=yes' TERM

# Neither the end nor the failure of one task may kill those that still save. srun does not take
# the number of CPUs from the job.
status=0
srun --kill-on-bad-exit=0 --wait=0 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" \
  python -m hypjax.main --coordinator=auto "$@" || status=$?

# The highest status of the tasks. 137: one was killed, and the others ended with 75.
if [ "$status" -ne 75 ] && [ "$status" -ne 137 ]; then
  exit "$status"
fi
if [ -n "$ended" ]; then
  echo "Slurm ended this job; submitted anew, the same command goes on" >&2
elif [ "${SLURM_RESTART_COUNT:-0}" -ge "$most_restarts" ]; then
  echo "started $most_restarts times over; submitted anew, the same command goes on" >&2
else
  echo "status $status: queued again" >&2
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
