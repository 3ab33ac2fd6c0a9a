"""The precision of the products of searches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hypjax.geometry import Fused, PoincareBall, Sphere
from hypjax.retrieval import galleries, rankings, selection, tiles
from hypjax.retrieval.inputs import Labelled
from hypjax.retrieval.scores import Precision, Score
from tests.helpers.steps import float32_products


@pytest.mark.parametrize("space", [PoincareBall(), Sphere(), Fused(((Sphere(), 1.0),))], ids=str)
def test_no_product_of_the_search_is_rounded(space):
    x, mesh = np.asarray(space.embed(jnp.ones((64, 8)))), tiles.Mesh(jax.local_devices(), "tiles")
    score = Score.around(space, x, Precision.SINGLE)
    points = tiles._sort_by_class(score, Labelled(x, np.zeros(64, np.int32)))
    some = tiles._distribute(mesh, np.zeros((1, 2), np.int32))
    thresholds = tiles._Thresholds(*points.factors.slack[0].T)
    chunk = next(galleries.as_gallery(x).chunks(score, 64))
    programs = [
        tiles._thresholds(mesh, True).trace(space, points, points, some),
        tiles._count_before(mesh, True).trace(space, points, points, thresholds, some, some),
        jax.jit(selection._multiply).trace(jnp.zeros((64, 64)), space, points.factors.query, chunk),
        rankings._bounds_of_chunk.trace(space, points.factors, points.factors),
    ]
    for program in programs:
        found = float32_products(program.lower(lowering_platforms=("tpu",)))
        assert found and all(product.groups() == ("HIGHEST", "HIGHEST") for product in found)
