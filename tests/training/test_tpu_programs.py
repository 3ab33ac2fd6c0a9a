"""Programs compiled for a slice of eight TPUs, which need not exist."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from benchmarks import programs
from hypjax import parallel
from hypjax.config import default_config
from hypjax.geometry import PoincareBall
from hypjax.retrieval import ranks, tiles
from hypjax.retrieval.inputs import Labelled
from hypjax.retrieval.scores import Score
from hypjax.system import targets

pytest.importorskip("libtpu", reason="compiling for TPUs needs libtpu")


@pytest.fixture(scope="module")
def slice_of_eight():
    return targets.devices_of("v5e:2x4")


@pytest.fixture(scope="module")
def config():
    """A small version of the recipe for SOP: bfloat16, 2 images of each class."""
    config = default_config()
    with config.unlocked():
        sizes = {"patch_size": 16, "width": 64, "depth": 1, "num_heads": 2, "architecture": "vit"}
        config.model.update(sizes | {"precision": "bfloat16"})
        config.train.batch_size, config.train.samples_per_class = 236, 2
    return config


def test_a_step_exchanges_embeddings_and_gradients_once_and_rounds_nothing(slice_of_eight, config):
    mesh = parallel.create_mesh((-1, 1), slice_of_eight)
    program = programs.compiled_step(config, mesh)
    assert program.collectives == ["all-gather f32", "all-reduce f32"]
    assert program.rounded == []
    assert "f32 × f32" not in program.products and program.products["bf16 × bf16"] >= 12
    with config.unlocked():
        config.run.microbatch = 30
    assert programs.compiled_step(config, mesh).temporary < 0.6 * program.temporary


def test_ranks_of_60502_queries_compile_and_round_nothing(slice_of_eight):
    """The test split of Stanford Online Products, on all devices."""
    mesh, space = Mesh(slice_of_eight, tiles.AXIS), PoincareBall(0.1)
    given = Labelled(np.zeros((60_502, 128), np.float32), np.arange(60_502) // 5)
    score, here = Score.around(space, given.points), Mesh(jax.local_devices(), tiles.AXIS)
    points = tiles.SortedPoints(given, np.arange(60_502), score, here).chunk(0)
    assigned = tiles.Tiles(np.zeros((8, 64)), np.zeros((8, 64)), np.zeros(8))
    assigned = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.int32), assigned)
    points = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), points)
    bounds = jax.ShapeDtypeStruct((2, len(points.ids)), jnp.float32)
    match, count = ranks.programs(mesh, exclude_self=True, symmetric=False, match_sides=(256, 256))
    for lowered in (
        match.lower(space, points, points, assigned),
        count.lower(space, points, points, bounds, None, assigned, assigned),
    ):
        program = programs.describe(lowered.compile())
        assert program.rounded == []
        assert program.temporary < 2**30
