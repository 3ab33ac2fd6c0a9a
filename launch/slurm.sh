#!/usr/bin/env bash
# Trains on several nodes of a Slurm cluster, one task per GPU. Submit it from the repository's
# folder, with hypjax's environment active. Repository, environment and data must be on a disk that
# all nodes share:
# sbatch launch/slurm.sh --config=configs/sop.py --config.run.data_dir=/shared/datasets
# When its time is up or it is preempted, the job saves, requeues itself and later resumes.
# scancel --signal=TERM JOB also saves and requeues; scancel JOB ends the job. Options before the
# script's name override those below: sbatch --nodes=4 launch/slurm.sh ...
#SBATCH --job-name=hypjax
#SBATCH --nodes=2
# JAX assigns a node's first task to the first visible GPU, the second task to the second, and so
# on, so every task must see all GPUs. With --gpus-per-task each would see only one.
#SBATCH --ntasks-per-node=4
#SBATCH --gres=gpu:4
#SBATCH --cpus-per-task=8
#SBATCH --time=12:00:00
# Sends SIGTERM to the tasks, not to this script, early enough for one step and one save. Slurm may
# send it up to a minute early.
#SBATCH --signal=TERM@120
# Also requeue after a node failure.
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail
most_restarts=100
# Without its CUDA packages, JAX then fails rather than use the CPU.
export JAX_PLATFORMS=${JAX_PLATFORMS:-cuda,cpu}

# Slurm signals this script only if it ends the whole job: cancelled, out of time, or preempted
# without grace time, after which Slurm may requeue the job itself. srun then receives the signal
# too and kills the tasks, so that the run resumes from its last checkpoint.
ended=
trap 'ended=yes' TERM

# One task that exits or fails must not kill others that are still saving. srun does not inherit
# --cpus-per-task from the job.
status=0
srun --kill-on-bad-exit=0 --wait=0 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" \
  python -m hypjax.main --coordinator=auto "$@" || status=$?

# srun returns the highest status of its tasks: 137 if one was killed; JAX aborts the others: 134.
case $status in
  75 | 134 | 137) ;;
  *) exit "$status" ;;
esac
if [ -n "$ended" ]; then
  echo "Slurm ended this job; submit the same command again to resume" >&2
elif [ "${SLURM_RESTART_COUNT:-0}" -ge "$most_restarts" ]; then
  echo "restarted $most_restarts times; submit the same command again to resume" >&2
else
  echo "status $status: requeued" >&2
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
