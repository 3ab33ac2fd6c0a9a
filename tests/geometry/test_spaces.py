"""The properties of a space on which losses and search rely."""

import jax
import jax.numpy as jnp
import jax.test_util
import numpy as np
import pytest

from hypjax.errors import UserError
from hypjax.geometry import Fused, Lorentz, PoincareBall, Product, Sphere, poincare

RANKING = [Sphere(), PoincareBall(0.1, 2.3), PoincareBall(1.0, 1.5), PoincareBall(0.0, None)]
RANKING += [Lorentz(0.1, 2.3), Lorentz(1.0, 1.5), Lorentz(0.0, None)]
FUSED = Fused(((Sphere(), 2.0), (PoincareBall(0.1, 2.3), 0.5)))
PARTS = ((Sphere(), 2.0), (PoincareBall(0.5, 2.3), 0.5), (Lorentz(1.0, 1.5), 1.0), (Sphere(), 1.0))
PRODUCTS = [Product(PARTS), Product(PARTS, summed=True)]
SPACES = [*RANKING, FUSED, *PRODUCTS]
WIDE = PoincareBall(1e-4, None)
features = np.random.default_rng(0).normal(size=(30, 8)).astype(np.float32)
WEIGHTS = np.random.default_rng(2).normal(size=(5, 4))


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_embedded_features_are_points_of_the_space(space):
    space.check(space.embed(features))
    space.check(space.embed(1e4 * features))
    similarity = space.similarity(np.linspace(0, 4, 9))
    assert similarity[0] == 1 and np.all(np.diff(similarity) < 0)


def total_distance(v, w, space, name):
    """Weighted sum of the distances of features, for gradients by these and by the space's."""
    x, y = space.embed(v), space.embed(w)
    distances = space.distance(x[:, None], y) if name == "distance" else space.distance_matrix(x, y)
    return jnp.sum(jnp.asarray(WEIGHTS, distances.dtype) * distances)


gradients = jax.jit(jax.grad(total_distance, (0, 1, 2)), static_argnums=3)


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_gradients_of_distances_and_of_their_matrix_are_finite_differences(space, float64):
    space = jax.tree.map(lambda number: number + 0.02, space)  # Steps must not make c negative.
    v, w = (jnp.asarray(each, float) for each in (features[:5], features[5:9]))
    total = jax.jit(lambda *given: total_distance(*given, "distance"))
    jax.test_util.check_grads(total, (v, w, space), order=1, modes=["rev"], rtol=1e-4)
    names = ("distance_matrix", "distance")
    both = [jax.tree.leaves(gradients(v, w, space, name)) for name in names]
    x, y = space.embed(v), space.embed(w)
    np.testing.assert_allclose(
        space.distance_matrix(x, y), space.distance(x[:, None], y), rtol=1e-9
    )
    for found, expected in zip(*both, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-7, atol=1e-9)


@jax.jit
def _all_gradients(v, w, space):
    def total(v, w, space):
        x, y = space.embed(v), space.embed(w)
        results = [space.distance(x, y), space.distance_matrix(x, y), space.distance_matrix(x, x)]
        results += [space.separation(x, y), space.features(x), space.mean(jnp.stack([x, y]))]
        results += [space.embed(100 * v)] + ([space.to_ball(x)] if space.ball() else [])
        return sum(jnp.sum(result) for result in results)

    return jax.value_and_grad(total, argnums=(0, 1, 2))(v, w, space)


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_gradients_are_finite_everywhere(space):
    v, w = features[:4], features[4:8]
    clipped = 2.3 * v / np.linalg.norm(v, axis=1, keepdims=True)  # At the clip radius.
    for pair in ((v, w), (v, v), (v, -v), (0 * v, 0 * v), (v, 0 * v), (clipped, w)):
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(_all_gradients(*pair, space)))


@pytest.mark.parametrize("space", RANKING, ids=str)
def test_search_vectors_rank_by_distance(space, float64):
    rng = np.random.default_rng(0)
    for scale in (0.1, 1.0, 3.0):
        x, y = (space.embed(scale * rng.normal(size=(n, 5))) for n in (40, 30))
        product = space.search_vectors(x, "query") @ space.search_vectors(y, "gallery").T
        distance = space.distance(x[:, None], y[None])
        np.testing.assert_array_equal(np.argsort(-product, axis=1), np.argsort(distance, axis=1))


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_radii_and_directions_are_what_embed_and_features_return(space):
    far = np.concatenate([features, 30 * features])  # Clipped, or as far as points are.
    norms = np.linalg.norm(far, axis=1, keepdims=True)
    x = space.embed(far)
    np.testing.assert_allclose(space.embed(space.features(x)), x, rtol=1e-5, atol=1e-6)
    if isinstance(space, Product):
        assert space.radii(norms, np) is None
        return
    length, radii = space.radii(norms, np)
    points = np.concatenate([far / norms * radius for radius in radii], axis=1)
    np.testing.assert_allclose(points, x, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(far / norms * length, space.features(x), rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_a_mean_is_a_point_that_is_near_its_points(space):
    """Of equal points it is that one; it is drawn towards those that weigh more."""
    x = space.embed(features).reshape(5, 6, -1)
    mean, of_others = space.mean(x), space.mean(x[:, :5])
    space.check(mean)
    np.testing.assert_allclose(space.mean(x[:, :1].repeat(6, 1)), x[:, 0], rtol=1e-5, atol=1e-6)
    heavy = space.mean(x, np.array([1.0, 0, 0, 0, 0, 9]))
    assert np.all(space.distance(heavy, x[:, 5]) < space.distance(heavy, x[:, 0]))
    if space in RANKING:  # The mean has the least sum of squares.
        power = 1 if space == Sphere() else 2  # The distance on the sphere is a square already.
        sums = [np.sum(space.distance(z[:, None], x) ** power, axis=1) for z in (mean, of_others)]
        assert np.all(sums[0] < sums[1])


def test_fused_distances_are_weighted_sums_over_one_direction():
    unit = features / np.linalg.norm(features, axis=1, keepdims=True)
    sphere, ball = unit, PoincareBall(0.1, 2.3).embed(unit)
    points = FUSED.embed(features)
    np.testing.assert_allclose(points, np.concatenate([sphere, ball], axis=1), atol=1e-6)
    pairs = 2 * Sphere().distance(sphere[:, None], sphere)
    pairs += 0.5 * PoincareBall(0.1).distance(ball[:, None], ball)
    np.testing.assert_allclose(FUSED.distance(points[:, None], points), pairs, rtol=1e-4, atol=1e-4)
    longer = Fused(FUSED.parts, normalized=False).embed(features)
    np.testing.assert_allclose(longer[:, 8:], PoincareBall(0.1, 2.3).embed(features), atol=1e-6)


@pytest.mark.parametrize("space", PRODUCTS, ids=["root", "sum"])
def test_a_product_combines_the_distances_of_its_parts(space, float64):
    v = features.astype(np.float64)
    x, shares = space.embed(v), np.split(v, 4, axis=1)
    apart = 0
    for (part, weight), share in zip(PARTS, shares, strict=True):
        points = np.asarray(part.embed(share))
        between = weight * np.asarray(part.distance(points[:, None], points))
        if not space.summed:  # Weights are those of lengths.
            between = weight * between if part == Sphere() else between**2
        apart += between
    expected = apart if space.summed else np.sqrt(apart)
    np.testing.assert_allclose(space.distance(x[:, None], x), expected, rtol=1e-9, atol=1e-9)
    with jax.enable_x64(False):  # Equal points are at the distance 0, without a gradient.
        slope = jax.grad(lambda x: space.distance(x, x[::-1]).sum())(
            np.float32(np.array(x)[[0, 0]])
        )
    assert np.isfinite(slope).all() and not space.distance(x, x).any()
    with pytest.raises(ValueError, match="parts"):
        Product(((Sphere(), 1.0), (FUSED, 1.0)))
    with pytest.raises(UserError, match="7 dimensions cannot be shared by the 4 parts"):
        space.embed(features[:, :7])


def test_riemannian_gradients_are_scaled_by_the_inverse_metric_but_for_the_curvature():
    plain, scaled = PoincareBall(0.1, 2.3), PoincareBall(0.1, 2.3, riemannian=True)
    np.testing.assert_array_equal(plain.embed(features), scaled.embed(features))
    weights = np.random.default_rng(1).normal(size=features.shape).astype(np.float32)
    x, pullback = jax.vjp(plain.embed, features)
    expected = pullback(weights * (1 - 0.1 * jnp.sum(x**2, axis=-1, keepdims=True)) ** 2 / 4)[0]
    got = jax.vjp(scaled.embed, features)[1](weights)[0]
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-6)
    gradients = [
        jax.grad(lambda c, r=riemannian: PoincareBall(c, 2.3, r).embed(features).sum())(0.1)
        for riemannian in (False, True)
    ]
    np.testing.assert_allclose(gradients[1], gradients[0], rtol=1e-5)


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_what_is_not_finite_is_no_point(space):
    for value in (np.nan, np.inf, -np.inf):
        x = np.array(space.embed(features))
        x[[7, 9], 3] = value
        with pytest.raises(UserError, match=r"embedding 7 is not finite \(2 of 30 rows\)"):
            space.check(x)
        embedded = space.embed(np.array([value, 1, 1, 1], np.float32))
        with pytest.raises(UserError, match="embedding 0 is not finite"):
            space.check(embedded[None])


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
        np.testing.assert_allclose(Sphere().embed(long), unit, atol=3e-7)
        for c, radius in ((0.1, 2.3), (0.1, None), (1.0, 1.5)):
            ball = PoincareBall(c, radius)
            norm = np.tanh(np.sqrt(c) * min(length, radius or np.inf)) / np.sqrt(c)
            norm = min(norm, poincare.MAX_NORM / np.sqrt(c))
            np.testing.assert_allclose(ball.embed(long), norm * unit, rtol=1e-5, atol=1e-38)
            hyperboloid = Lorentz(c, radius)
            norm = min(length, radius or np.inf, np.arctanh(poincare.MAX_NORM) / np.sqrt(c))
            norm = np.sinh(2 * np.sqrt(c) * norm) / np.sqrt(c)
            np.testing.assert_allclose(hyperboloid.embed(long), norm * unit, rtol=1e-5, atol=1e-38)
            for space in (ball, hyperboloid):
                assert np.all(space.clipped(long) == (length > (radius or np.inf)))
    with jax.enable_x64(True):
        long = np.array([[1e200, 1e200], [1e-200, 0], [0, 0]])
        np.testing.assert_allclose(Sphere().embed(long), [[0.5**0.5] * 2, [1, 0], [0, 0]])


@pytest.mark.parametrize("space", [PoincareBall, Lorentz])
def test_a_curved_space_that_does_not_exist_is_refused(space):
    for fields in ({"c": -1}, {"c": np.nan}, {"c": "a"}, {"clip_radius": -2.3}):
        with pytest.raises(ValueError, match=f"{next(iter(fields))} is .*; it must be"):
            space(**fields)


@pytest.mark.parametrize("space", [Sphere(), WIDE, Lorentz(1e-4, None)], ids=str)
@pytest.mark.parametrize("name", ["distance", "distance_matrix", "separation"])
def test_integers_count_as_floats(space, name):
    """Differences and squares of bytes would wrap around."""
    x = np.random.default_rng(0).integers(0, 32, (4, 4), np.uint8)
    found, expected = (getattr(space, name)(x[:2], x[2:]) for x in (x, x.astype(np.float32)))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
