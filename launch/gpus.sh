#!/usr/bin/env bash
# Trains on all GPUs of one machine, in one process. Takes the flags of hypjax.main:
# launch/gpus.sh --config=configs/sop.py --config.run.workers=8
# Each GPU processes a part of every batch and holds a copy of the parameters. Useful flags:
#   --config.run.sharding=fsdp   each GPU holds a part of the parameters
#   --config.run.mesh=2,4        8 GPUs: 2 copies of the parameters, each sharded over 4 GPUs
#   --config.run.microbatch=100  100 images at a time: same gradient, less memory
#   --config.run.remat=True      recomputes activations: less memory, slower
# and environment variables:
#   CUDA_VISIBLE_DEVICES=0,1     use only these GPUs
#   XLA_FLAGS=--xla_gpu_deterministic_ops=true  bit-identical repeats, slower
set -euo pipefail
# JAX would silently train on the CPU.
if ! python -c 'import jax; raise SystemExit(jax.default_backend() == "cpu")'; then
  echo "error: JAX finds no GPU; check nvidia-smi, then run: pip install -e '.[cuda12]' (or cuda13)" >&2
  exit 1
fi
exec python -m hypjax.main "$@"
