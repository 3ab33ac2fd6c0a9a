"""Saved and restored states."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np

from hypjax.runs.checkpoints import Checkpoints
from hypjax.runs.shared_checkpoints import SharedCheckpoints
from hypjax.training import states
from tests.helpers.steps import random_batch, start


def test_a_restored_state_does_not_compile_the_step_again(load_glyphs, tmp_path):
    state, step = start(load_glyphs())
    state, _ = step(state, random_batch())
    checkpoints = SharedCheckpoints(lambda: Checkpoints(tmp_path))
    recalls = states.Measured(untrained={"test": {"head": {"recall@1": 0.5}}})
    states.save(checkpoints, state, recalls)
    checkpoints.close()
    fresh, step = start(load_glyphs())
    saved = SharedCheckpoints(lambda: Checkpoints(tmp_path))
    restored, remembered = states.restore(saved, fresh)
    assert remembered == recalls
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    for a, b in zip(jax.tree.leaves(restored), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(a, b)
    for i in range(3):
        restored, _ = step(restored, random_batch(i))
    assert step._cache_size() == 1


def test_a_checkpoint_of_other_devices_can_be_restored(tmp_path):
    """Saved on the second of two devices, read where there is one."""
    program = (
        "import jax, pathlib, sys; from hypjax.runs.checkpoints import Checkpoints;"
        "c = Checkpoints(pathlib.Path(sys.argv[1]));"
        "x = jax.device_put(jax.numpy.arange(3.0), jax.devices()[1]);"
        "c.save(1, record={}, model={'x': x});"
        "c.close()"
    )
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", program, str(tmp_path)]
    subprocess.run(command, env=os.environ | flags, check=True, capture_output=True)
    shapes = {"x": jax.ShapeDtypeStruct((3,), jnp.float32)}
    ((model,),) = [Checkpoints(tmp_path).restore_latest(model=shapes).trees]
    np.testing.assert_array_equal(model["x"], [0, 1, 2])
