#!/usr/bin/env bash
# Trains on all GPUs of one machine, in one process; flags are those of hypjax.main:
# launch/gpus.sh --config=configs/sop.py --config.run.workers=8
# Every GPU gets a share of each batch and a copy of the parameters. What else can be set:
#   --config.run.mesh=2,4        8 GPUs: 2 copies of the parameters, each cut into 4 parts
#   --config.run.microbatch=100  100 images at a time: the same gradient, less memory
#   --config.run.remat=True      activations are computed twice: less memory
# and before the command
#   CUDA_VISIBLE_DEVICES=0,1     these GPUs only
#   XLA_FLAGS=--xla_gpu_deterministic_ops=true  operations that repeat bit for bit, slower
set -euo pipefail
# JAX itself would go on without GPUs.
if ! python -c 'import jax; raise SystemExit(jax.default_backend() == "cpu")'; then
  echo "error: JAX sees no GPU; see what nvidia-smi says, then: pip install -e '.[cuda12]'" >&2
  exit 1
fi
exec python -m hypjax.main "$@"
