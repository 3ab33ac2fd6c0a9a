"""The precision of the products of searches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hypjax.geometry import PoincareBall, Sphere
from hypjax.retrieval import galleries, neighbors, ranks
from tests.helpers.steps import float32_products


@pytest.mark.parametrize("space", [PoincareBall(), Sphere()])
def test_no_product_of_the_search_is_rounded(space):
    x, mesh = np.asarray(space.embed(jnp.ones((64, 8)))), ranks.Mesh(jax.local_devices(), "tiles")
    points = ranks._sort_by_class(space, x, np.zeros(64, np.int32))
    tiles = ranks._distribute(mesh, np.zeros((1, 2), np.int32))
    nearest = ranks._Nearest(points.offset, points.ids)
    chunk = next(galleries.as_gallery(x).chunks(space, 64))
    programs = [
        ranks._nearest_matches(mesh, True).trace(points, points, tiles),
        ranks._ranks(mesh, True).trace(points, points, nearest, tiles, tiles),
        jax.jit(neighbors._multiply).trace(jnp.zeros((64, 64)), points.query, chunk),
    ]
    for program in programs:
        found = float32_products(program.lower(lowering_platforms=("tpu",)))
        assert found and all(product.groups() == ("HIGHEST", "HIGHEST") for product in found)
