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
# Without it, JAX goes on without GPUs where their driver or its own CUDA packages are missing.
export JAX_PLATFORMS=${JAX_PLATFORMS:-cuda,cpu}
exec python -m hypjax.main "$@"
