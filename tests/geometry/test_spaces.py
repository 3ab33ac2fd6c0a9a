"""The properties of a space on which losses and search rely."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hypjax.errors import UserError
from hypjax.geometry import Fused, Lorentz, PoincareBall, Product, Sphere, poincare, spaces

CURVED = [PoincareBall, Lorentz]
# With one clip radius, a program serves balls of all curvatures.
RANKING = [Sphere(), *(kind(c, 2.3) for kind in CURVED for c in (0.1, 1.0, 0.0))]
FUSED = Fused(((Sphere(), 2.0), (PoincareBall(0.1, 2.3), 0.5)))
PARTS = ((Sphere(), 2.0), (PoincareBall(0.5, 2.3), 0.5), (Lorentz(1.0, 1.5), 1.0), (Sphere(), 1.0))
PRODUCTS = [Product(PARTS[:2]), Product(PARTS[:2], summed=True)]
SPACES = [*RANKING, FUSED, *PRODUCTS]
SLOW = [pytest.param(space, marks=pytest.mark.slow) for space in (FUSED, PRODUCTS[1])]
DEFAULT = [*RANKING, PRODUCTS[0], *SLOW]
UNCLIPPED = [kind(1e-4, None) for kind in CURVED]
features = np.random.default_rng(0).normal(size=(30, 8)).astype(np.float32)
WEIGHTS = np.random.default_rng(2).normal(size=(5, 4))


embed = jax.jit(lambda space, v: space.embed(v))
clipped = jax.jit(lambda space, v: space.clipped(v))
distances = jax.jit(lambda space, x: space.distance(x[:, None], x))


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_embedded_features_are_points_of_the_space(space):
    space.check(embed(space, features))
    space.check(embed(space, 1e4 * features))
    similarity = space.similarity(np.linspace(0, 4, 9))
    assert similarity[0] == 1 and np.all(np.diff(similarity) < 0)


@jax.jit
@functools.partial(jax.jacrev, argnums=(0, 1, 2), has_aux=True)
def total_distances(v, w, space):
    """Weighted sums of the distances of features and of their matrix, their gradients, and both."""
    x, y = space.embed(v), space.embed(w)
    both = jnp.stack([space.distance(x[:, None], y), space.distance_matrix(x, y)])
    totals = jnp.sum(jnp.asarray(WEIGHTS, both.dtype)[None] * both, axis=(1, 2))
    return totals, (totals, both)


@pytest.mark.parametrize("space", DEFAULT, ids=str)
def test_gradients_of_distances_and_of_their_matrix_are_finite_differences(space, float64):
    space = jax.tree.map(lambda number: number + 0.02, space)  # Steps must not make c negative.
    v = np.float64(features[:5]) * [[0.2], [0.4], [0.6], [1], [2]]  # Clipped and not.
    at, rng = (v, np.float64(features[5:9]), space), np.random.default_rng(3)
    move = jax.tree.map(lambda x: rng.normal(size=np.shape(x)), at)
    gradients, (_, both) = total_distances(*at)
    ahead, behind = (
        total_distances(*jax.tree.map(lambda x, d, h=h: x + h * d, at, move))[1][0]
        for h in (1e-5, -1e-5)
    )
    pairs = zip(jax.tree.leaves(gradients), jax.tree.leaves(move), strict=True)
    slopes = sum(np.reshape(gradient, (2, -1)) @ np.ravel(d) for gradient, d in pairs)
    np.testing.assert_allclose(slopes, (ahead - behind) / 2e-5, rtol=1e-4)
    np.testing.assert_allclose(both[1], both[0], rtol=1e-9)
    for actual in jax.tree.leaves(gradients):
        np.testing.assert_allclose(actual[1], actual[0], rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize(
    "space", [*(kind(1.0, None) for kind in CURVED), PoincareBall(9.0, 2.3)], ids=str
)
def test_a_matrix_of_points_far_out_has_their_distances(space, traced):
    """Products would give equal points a distance of up to 7.4."""

    def values(v, c):
        c = c if traced else space.c
        x = dataclasses.replace(space, c=c).embed(v)
        return space.with_scalars({"c": c}).distance_matrix(x, x)

    v = 6 / space.c**0.5 * features / np.linalg.norm(features, axis=1, keepdims=True)
    v = np.concatenate([v, v + np.float32(1e-5)])
    matrix = jax.jit(values)(v, space.c)
    exact = distances(space, embed(space, v))
    assert not np.diagonal(matrix).any()
    np.testing.assert_allclose(matrix, exact, rtol=1e-2, atol=0.03 / space.c**0.5)
    slopes = jax.jit(jax.grad(lambda v, c: values(v, c).sum(), (0, 1)))(v, space.c)
    assert all(np.isfinite(slope).all() for slope in slopes)


@pytest.mark.parametrize("space", [kind(c, None) for kind in CURVED for c in (1.0, 10.0)], ids=str)
def test_means_near_the_limiting_radius_are_right(space):
    """In float32, means of equal and of close points were NaN."""
    v = 20 * features / np.linalg.norm(features, axis=1, keepdims=True)
    x = np.asarray(embed(space, v))
    near = np.asarray(embed(space, v * np.float32(1.001)))
    sets = np.stack([x, near, x], axis=1)
    weights = np.float32([1, 2, 0.5])
    means = [jax.jit(space.mean)(sets), jax.jit(space.mean)(sets, np.tile(weights, (30, 1)))]
    with jax.enable_x64(True):
        apart = space.distance(np.asarray(means, np.float64), np.asarray(x, np.float64)[None])
    assert np.max(apart) < 0.05 / space.c**0.5


@jax.jit
def _all_gradients(v, w, space):
    def total(v, w, space):
        x, y = space.embed(v), space.embed(w)
        results = [space.distance(x, y), space.distance_matrix(x, y), space.separation(x, y)]
        results += [space.features(x), space.mean(jnp.stack([x, y]))]
        results += [space.to_ball(x)] if space.ball() else []
        return sum(jnp.sum(result) for result in results)

    return jax.value_and_grad(total, argnums=(0, 1, 2))(v, w, space)


@pytest.mark.parametrize("space", DEFAULT, ids=str)
def test_gradients_are_finite_everywhere(space):
    v, w = features[:4], features[4:8]
    clipped = 2.3 * v / np.linalg.norm(v, axis=1, keepdims=True)  # At the clip radius.
    pairs = ((v, w), (v, v), (v, -v), (0 * v, 0 * v), (v, 0 * v), (clipped, w), (0.1 * v, 100 * w))
    for pair in pairs:
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(_all_gradients(*pair, space)))


@jax.jit
def _products_and_distances(space, v, w):
    x, y = space.embed(v), space.embed(w)
    product = space.search_vectors(x, "query") @ space.search_vectors(y, "gallery").T
    return product, space.distance(x[:, None], y[None])


@pytest.mark.parametrize("space", RANKING, ids=str)
def test_search_vectors_rank_by_distance(space, float64):
    rng = np.random.default_rng(0)
    for scale in (0.1, 1.0, 3.0):
        v, w = (scale * rng.normal(size=(n, 5)) for n in (40, 30))
        product, distance = map(np.asarray, _products_and_distances(space, v, w))
        np.testing.assert_array_equal(np.argsort(-product, axis=1), np.argsort(distance, axis=1))


@pytest.mark.parametrize("space", [*SPACES, *UNCLIPPED], ids=str)
def test_features_are_what_embed_returns_shortened(space):
    far = np.concatenate([features[:15], 30 * features[15:]])  # Clipped, or as far as points are.
    x = embed(space, far)
    actual = np.asarray(spaces.features(space, x))
    np.testing.assert_allclose(embed(space, actual), x, rtol=1e-5, atol=1e-6)


@jax.jit
def _means(space, x, weights):
    """Means of x and of copies of each first point, weighted means, and distances of all from x."""
    means = space.mean(jnp.stack([x, x[:, :1].repeat(6, 1)]))
    weights = jnp.broadcast_to(weights[:, None], (2, 5, 6))
    means = jnp.concatenate([means, space.mean(jnp.stack([x, x]), weights)])
    return means, space.distance(means[:, :, None], x)


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_a_mean_is_a_point_that_is_near_its_points(space):
    """Of equal points it is that one; it is drawn towards those that weigh more."""
    x = np.asarray(embed(space, features)).reshape(5, 6, -1)
    weights = np.array([[1.0, 1, 1, 1, 1, 0], [1, 0, 0, 0, 0, 9]])
    means, apart = map(np.asarray, _means(space, x, weights))
    space.check(means[0])
    np.testing.assert_allclose(means[1], x[:, 0], rtol=1e-5, atol=1e-6)
    assert np.all(apart[3, :, 5] < apart[3, :, 0])
    if space in RANKING:  # The mean has the least sum of squares.
        power = 1 if space == Sphere() else 2  # The distance on the sphere is a square already.
        sums = np.sum(apart**power, axis=2)
        assert np.all(sums[0] < sums[2])


def test_fused_distances_are_weighted_sums_over_one_direction():
    unit = features / np.linalg.norm(features, axis=1, keepdims=True)
    sphere, ball = unit, np.asarray(embed(PoincareBall(0.1, 2.3), unit))
    points = np.asarray(embed(FUSED, features))
    np.testing.assert_allclose(points, np.concatenate([sphere, ball], axis=1), atol=1e-6)
    pairs = 2 * distances(Sphere(), sphere) + 0.5 * distances(PoincareBall(0.1), ball)
    np.testing.assert_allclose(distances(FUSED, points), pairs, rtol=1e-4, atol=1e-4)
    longer = embed(Fused(FUSED.parts, normalized=False), features)
    np.testing.assert_allclose(longer[:, 8:], embed(PoincareBall(0.1, 2.3), features), atol=1e-6)


@pytest.mark.parametrize("summed", [False, True], ids=["root", "sum"])
def test_a_product_combines_the_distances_of_its_parts(summed, float64):
    space = Product(PARTS, summed=summed)
    v = features.astype(np.float64)
    apart = 0
    for (part, weight), share in zip(PARTS, np.split(v, 4, axis=1), strict=True):
        between = weight * np.asarray(distances(part, embed(part, share)))
        if not summed:  # Weights are those of lengths.
            between = weight * between if part == Sphere() else between**2
        apart += between
    actual = np.asarray(distances(space, embed(space, v)))
    np.testing.assert_allclose(actual, apart if summed else np.sqrt(apart), rtol=1e-9, atol=1e-9)
    with jax.enable_x64(False):  # Equal points are at the distance 0, without a gradient.
        x = np.asarray(embed(space, features))[[0, 0]]
        slope = jax.jit(jax.grad(lambda x: space.distance(x, x[::-1]).sum()))(x)
    assert np.isfinite(slope).all() and not np.diagonal(actual).any()
    with pytest.raises((ValueError, TypeError), match="parts"):  # By types, where they are checked.
        Product(((Sphere(), 1.0), (FUSED, 1.0)))
    with pytest.raises(UserError, match="7 dimensions cannot be split among 4 parts"):
        space.embed(features[:, :7])


def test_riemannian_gradients_are_scaled_by_the_inverse_metric_but_for_the_curvature():
    @jax.jit
    def pulled_back(space, weights):
        x, pullback = jax.vjp(lambda v, space: space.embed(v), features, space)
        return x, *pullback(weights)

    weights = np.random.default_rng(1).normal(size=features.shape).astype(np.float32)
    plain, scaled = PoincareBall(0.1, 2.3), PoincareBall(0.1, 2.3, riemannian=True)
    x, _, by_curvature = pulled_back(plain, weights)
    same, gradient, same_by_curvature = pulled_back(scaled, weights)
    np.testing.assert_allclose(same, x, rtol=1e-6)
    factors = (1 - 0.1 * np.sum(np.square(x), axis=-1, keepdims=True)) ** 2 / 4
    expected = pulled_back(plain, weights * factors)[1]
    np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(same_by_curvature.c, by_curvature.c, rtol=1e-5)


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_what_is_not_finite_is_no_point(space):
    for value in (np.nan, np.inf, -np.inf):
        x = np.array(embed(space, features))
        x[[7, 9], 3] = value
        with pytest.raises(UserError, match=r"embedding 7 is not finite \(2 of 30 rows\)"):
            space.check(x)
        v = features.copy()
        v[4, 0] = value
        with pytest.raises(UserError, match="embedding 4 is not finite"):
            space.check(embed(space, v))


def test_check_rejects_points_outside_the_space():
    with pytest.raises(UserError, match="embedding 1 is outside the ball"):
        PoincareBall(1.0).check(np.array([[0.5, 0.5], [0.9, 0.9]]))
    with pytest.raises(UserError, match="embedding 1 is too far out"):
        Lorentz(1.0).check(np.array([[9e5, 0], [2e6, 0]]))
    with pytest.raises(UserError, match="embedding 0 is not of length 1"):
        Sphere().check(np.array([[0.5, 0.5], [0.6, 0.8]]))
    PoincareBall(1e-12).check(np.zeros((1, 2)))  # The smallest c that can be searched.


def test_embedding_does_not_depend_on_overflow():
    """The square of these lengths is not a finite float32, or rounds to 0."""
    directions = features / np.linalg.norm(features, axis=-1, keepdims=True)
    for length in (1e-30, 1e-3, 1.0, 1e18, 1e25, 3e37):
        long = (directions * length).astype(np.float32)
        unit = long / np.linalg.norm(long.astype(float), axis=-1, keepdims=True)
        np.testing.assert_allclose(embed(Sphere(), long), unit, atol=3e-7)
        for c, radius in ((0.1, 2.3), (0.1, None), (1.0, 2.3)):
            ball = PoincareBall(c, radius)
            norm = np.tanh(np.sqrt(c) * min(length, radius or np.inf)) / np.sqrt(c)
            norm = min(norm, poincare.MAX_NORM / np.sqrt(c))
            np.testing.assert_allclose(embed(ball, long), norm * unit, rtol=1e-5, atol=1e-38)
            hyperboloid = Lorentz(c, radius)
            norm = min(length, radius or np.inf, np.arctanh(poincare.MAX_NORM) / np.sqrt(c))
            norm = np.sinh(2 * np.sqrt(c) * norm) / np.sqrt(c)
            np.testing.assert_allclose(embed(hyperboloid, long), norm * unit, rtol=1e-5, atol=1e-38)
            for space in (ball, hyperboloid):
                assert np.all(clipped(space, long) == (length > (radius or np.inf)))
    with jax.enable_x64(True):
        long = np.array([[1e200, 1e200], [1e-200, 0], [0, 0]])
        np.testing.assert_allclose(embed(Sphere(), long), [[0.5**0.5] * 2, [1, 0], [0, 0]])


@pytest.mark.parametrize("space", [PoincareBall, Lorentz])
def test_a_curved_space_that_does_not_exist_is_refused(space):
    for fields in ({"c": -1}, {"c": np.nan}, {"clip_radius": -2.3}):
        with pytest.raises(ValueError, match=f"{next(iter(fields))} is .*; it must be"):
            space(**fields)


@pytest.mark.parametrize("space", [Sphere(), *UNCLIPPED], ids=str)
def test_integers_count_as_floats(space):
    """Differences and squares of bytes would wrap around."""

    @jax.jit
    def results(x, y):
        return space.distance(x, y), space.distance_matrix(x, y), space.separation(x, y)

    x = np.random.default_rng(0).integers(0, 32, (4, 4), np.uint8)
    actual, expected = (results(x[:2], x[2:]) for x in (x, x.astype(np.float32)))
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", [PoincareBall, Lorentz])
def test_rescaled_features_stay_below_the_greatest_distance(kind, float64):
    """The values of the two sets of constants in circulation, for c = 1."""
    older, later = 0.9 * np.arccosh(2000), 1.2 * np.arccosh(1 / (2 * 1.2e-7)) / 2
    norms = np.array([[0.5], [2.0], [8.0], [1e30]])  # Half the distances before.
    v = norms * [0.6, 0.0, -0.8]
    for most, expected in ((older, (0.88, 3.29, 7.13)), (later, (0.88, 3.38, 8.61))):
        space = kind(1.0, 2.3, max_distance=most)
        points = embed(space, v)
        found = space.distance(points, np.zeros_like(points))
        np.testing.assert_allclose(found, [*expected, most], atol=0.005)
        np.testing.assert_allclose(space.features(points)[:3], v[:3], rtol=1e-6)
    with jax.enable_x64(False):
        slopes = jax.vmap(jax.grad(lambda v: space.embed(v).sum()))(np.float32([v[0] * 0, *v]))
    assert np.isfinite(slopes).all() and np.all(np.any(slopes[:3] != 0, axis=1))
