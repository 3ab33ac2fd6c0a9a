#!/usr/bin/env bash
# Embeds a large gallery as an array of a Slurm cluster, one part per task, and joins the parts.
# Submit it from the repository's folder, with hypjax's environment active, on a disk that all nodes
# share. Options before the script's name override those below:
# sbatch --array=1-16 launch/embed_slurm.sh --workdir=runs/a --images=photos --output=gallery.npz
# A part that is preempted or out of time saves what is done, and is requeued. Submitted again, the
# same command embeds only what is missing.
#SBATCH --job-name=hypjax-embed
#SBATCH --array=1-8
#SBATCH --gres=gpu:1
#SBATCH --cpus-per-task=8
#SBATCH --time=4:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail
part=$SLURM_ARRAY_TASK_ID count=$SLURM_ARRAY_TASK_COUNT
most_restarts=100
# Without its CUDA packages, JAX then fails rather than use the CPU.
export JAX_PLATFORMS=${JAX_PLATFORMS:-cuda,cpu}

status=0
srun --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" \
  python -m hypjax.embed "$@" --shard="$part/$count" || status=$?
if [ "$status" -eq 75 ] && [ "${SLURM_RESTART_COUNT:-0}" -lt "$most_restarts" ]; then
  echo "part $part: requeued" >&2
  scontrol requeue "${SLURM_ARRAY_JOB_ID}_$part"
fi
exit "$status"
