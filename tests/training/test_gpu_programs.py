"""Steps compiled for NVIDIA GPUs that need not exist, from their hardware figures."""

import pathlib

import pytest
from jax.experimental import topologies

from hypjax import parallel
from hypjax.benchmarks import programs
from hypjax.config import load_config
from hypjax.models import attention

TARGETS = pathlib.Path(__file__).parents[3] / "shared/tools/gpu_targets"
if not TARGETS.is_dir():
    pytest.skip(f"there are no figures of GPUs in {TARGETS}", allow_module_level=True)
pytest.importorskip("jax_plugins.xla_cuda12", reason="compiling for GPUs needs jax[cuda12]")

OPTIONS = {
    # Without a GPU nothing is tuned, and Triton's default tiles do not fit every product.
    "xla_gpu_enable_triton_gemm": False,
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}
SIZES = ["model.architecture=vit", "model.width=384", "model.num_heads=6", "model.patch_size=16"]
STEPS = {"glyphs.py": [], "cub.py:hyp-vit": [*SIZES, "train.batch_size=18"]}


@pytest.mark.parametrize("recipe", STEPS)
@pytest.mark.parametrize(("target", "dtype"), [("t4", "float32"), ("h100", "bfloat16")])
def test_a_step_compiles_in_the_precision_of_the_gpu(monkeypatch, recipe, target, dtype):
    """As if cuDNN's attention had passed its check, which runs on the GPU."""
    monkeypatch.setattr(attention, "_cudnn_supports", lambda *_: True)
    monkeypatch.setattr(
        programs, "describe", lambda lowered: lowered.compile(compiler_options=OPTIONS).as_text()
    )
    figures = (TARGETS / f"{target}.txtpb").read_text()
    gpu = topologies.get_topology_desc(platform="cuda", topology="1x1x1", target_config=figures)
    fields = [*STEPS[recipe], "model.depth=1"]  # The blocks are alike.
    config = load_config(recipe, fields)
    program = programs.compiled_step(config, parallel.create_mesh((1, 1), gpu.devices))
    assert ("bf16[" in program) == (dtype == "bfloat16")
    assert ("__cudnn$fmha" in program) == (dtype == "bfloat16")
