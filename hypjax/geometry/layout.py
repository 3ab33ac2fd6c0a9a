"""Layouts: positions in the Poincaré disk for points of any space, so that they can be drawn.

`lay_out` is metric multidimensional scaling in the hyperbolic plane: it minimises the squared
differences between distances in the disk and in the space, starting from the features' first two
principal components. In high dimensions, all distances are large, but a plane cannot hold many
points that are far from each other. The smallest distance is therefore subtracted from all
distances, which keeps their order.
"""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Complex, Float, Float32, Int

from hypjax.errors import UserError, require_package
from hypjax.geometry import spaces
from hypjax.geometry.arithmetic import inner_products
from hypjax.geometry.spaces import Space

_STEPS = 400
_NEIGHBOURS = 8  # Points of a layout between which `place_among` puts an added point.
_BLOCK = 1024  # Largest number of points whose distances to each other are compared in one step.
_MOST_PAIRED = 4096  # Points among which all distances are computed once, not in each step.
_RATE = 0.5  # Learning rate of the first step, from which it falls to 0.
_LARGEST_MOVE = 1.0  # Largest move of a point in one step, before the learning rate.
_NEAREST_QUANTILE = 0.01  # Quantile of the distances that counts as the smallest distance.
_MEDIAN_DISTANCE = 3.0  # Median distance in the disk, which fills it without crowding the border.
_MAX_RANKED = 1500  # Points whose pairwise distances are ranked.
_SMALLEST = 1e-12  # Keeps divisors above 0.
_LEAST_COSH = 1 + 1e-6  # Points count as equal if the cosh of their distance is not above it.
_FARTHEST = 40.0  # Tangents longer than this lead to the disk's edge; cosh² is still finite.
_EDGE = 1 - 1e-6  # Largest radius of a position, for outliers that float would put on the circle.
Positions = Complex[np.ndarray, " n"]  # In the Poincaré disk, inside the unit circle.
# The smallest distance, which is subtracted from the others, and the factor of the difference.
_Scaling = tuple[float, float] | tuple[Float[Array, ""], Float[Array, ""]]


def lay_out(points: Float[np.ndarray, "n d"], space: Space, *, seed: int = 0) -> Positions:
    """Lays out points in the Poincaré disk so that distances resemble those in the space.

    Positions are inside the unit circle. The seed draws the order in which points are compared.
    """
    rng = np.random.default_rng(seed)
    count = len(points)
    scaling = _scaling(points[rng.permutation(count)[:_BLOCK]], space)
    features = np.asarray(spaces.features(space, points))
    start = principal_components(features)
    median_length = np.median(np.linalg.norm(start, axis=1))
    start *= _MEDIAN_DISTANCE / 2 / max(median_length, 1e-6 * np.abs(features).max() + _SMALLEST)
    x = jnp.asarray(points)
    targets = _target_distances(x, x, space, scaling) if count <= _MOST_PAIRED else None
    tangents = jnp.asarray(start)
    for rate in np.linspace(_RATE, 0, _STEPS, dtype=np.float32):
        rows = np.sort(rng.permutation(count)[:_BLOCK])
        tangents = _step(tangents, rows, rate, targets, x, space, scaling)
    return to_disk(np.asarray(tangents))


def _scaling(sample: Float[np.ndarray, "n d"], space: Space) -> _Scaling:
    """Chooses the scaling by which a sample of points has the `_MEDIAN_DISTANCE` in the disk."""
    distinct = ~np.eye(len(sample), dtype=bool)
    distances = np.asarray(spaces.distance_matrix(space, sample, sample))[distinct]
    nearest, median = np.quantile(distances, (_NEAREST_QUANTILE, 0.5)) if len(distances) else (0, 0)
    nearest = min(nearest, median / 2)  # With very few points, all distances may be equal.
    return nearest, _MEDIAN_DISTANCE / max(median - nearest, _SMALLEST)


def place_among(
    added: Float[np.ndarray, "m d"],
    points: Float[np.ndarray, "n d"],
    positions: Positions,
    space: Space,
) -> Complex[np.ndarray, " m"]:
    """Positions of added points in a layout, by inverse distance weighting (Shepard, 1968).

    An added point lies at the centroid, on the hyperboloid, of its 8 nearest points of the layout.
    Their weights are their inverse squared distances from it in the space, so a point that the
    layout contains keeps its position.
    """
    distances = np.asarray(spaces.distance_matrix(space, added, points), np.float64)
    nearest = np.argsort(distances, axis=1)[:, :_NEIGHBOURS]
    weights = np.maximum(np.take_along_axis(distances, nearest, axis=1), _SMALLEST) ** -2
    squares = np.abs(positions) ** 2
    time = (1 + squares) / (1 - squares)  # Coordinates on the hyperboloid: time, and the plane's.
    plane = 2 * positions / (1 - squares)
    time, plane = (np.sum(weights * x[nearest], axis=1) for x in (time, plane))
    return plane / (time + np.sqrt(time**2 - np.abs(plane) ** 2))


def lay_out_by_umap(
    points: Float[np.ndarray, "n d"], space: Space, *, seed: int = 0, neighbours: int = 15
) -> Positions:
    """Lays out points by UMAP on the hyperboloid, as in Hyp-ViT's figures.

    UMAP finds neighbours by distances in the space, and lays points out on the hyperboloid, which
    is then projected to the Poincaré disk. UMAP starts from `lay_out`, which arranges groups of
    neighbours, and runs in one thread, because it has a seed. Raises a `UserError` if UMAP is not
    installed or there are no more points than neighbours.
    """
    require_package("umap", "a layout by UMAP", "hypjax[viz]")
    import umap

    if len(points) <= neighbours:
        raise UserError(f"UMAP needs more than {neighbours} images, but there are {len(points)}")
    start = lay_out(points, space, seed=seed)
    start = 2 * start / (1 - np.abs(start) ** 2)  # The plane's coordinates on the hyperboloid.
    reducer = umap.UMAP(
        n_neighbors=neighbours,
        metric="precomputed",
        output_metric="hyperboloid",
        random_state=seed,
        init=np.stack([start.real, start.imag], axis=1).astype(np.float32),
    )
    with warnings.catch_warnings():  # UMAP warns of effects that these settings intend.
        warnings.simplefilter("ignore", UserWarning)
        plane = reducer.fit_transform(np.asarray(spaces.distance_matrix(space, points, points)))
    plane = plane.astype(np.float64)
    return (plane[:, 0] + 1j * plane[:, 1]) / (1 + np.sqrt(1 + (plane**2).sum(axis=1)))


def principal_components(features: Float[np.ndarray, "n d"]) -> Float32[np.ndarray, "n 2"]:
    """The features' first two principal components; with one coordinate, the second is 0."""
    import scipy.linalg

    centred = features.astype(np.float64) - features.mean(axis=0)
    covariance = centred.T @ centred
    dim = len(covariance)
    _, vectors = scipy.linalg.eigh(covariance, subset_by_index=[max(dim - 2, 0), dim - 1])
    vectors = vectors[:, ::-1]
    projected = np.zeros((len(features), 2), np.float32)
    projected[:, : vectors.shape[1]] = centred @ vectors
    return projected


def to_disk(tangents: Float[np.ndarray, "n 2"]) -> Positions:
    """Maps tangents at the origin, whose lengths are hyperbolic distances, to the disk."""
    lengths = np.linalg.norm(tangents, axis=1)
    factors = np.minimum(np.tanh(lengths / 2), _EDGE) / np.maximum(lengths, _SMALLEST)
    return np.ascontiguousarray(tangents * factors[:, None], np.float64).view(np.complex128)[:, 0]


def faithfulness(
    points: Float[np.ndarray, "n d"], positions: Positions, space: Space
) -> tuple[float, float] | None:
    """Spearman's rank correlations between distances in the space and in two plots of the points.

    The plots are the layout in the disk, and the features' first two principal components. At most
    1,500 points are compared. Returns None for fewer than three points.
    """
    if len(points) < 3:
        return None
    sample = np.random.default_rng(0).permutation(len(points))[:_MAX_RANKED]
    pairs = np.triu_indices(len(sample), 1)
    distances = spaces.distance_matrix(space, points[sample], points[sample])
    ranks = _average_ranks(np.asarray(distances)[pairs])

    def correlation(positions: Positions) -> float:
        x, y = (positions[sample][indices] for indices in pairs)
        ratios = np.abs((x - y) / (1 - x.conj() * y))  # Increase with the distance in the disk.
        return float(np.corrcoef(ranks, _average_ranks(ratios))[0, 1])

    components = principal_components(np.asarray(spaces.features(space, points)))
    return correlation(positions), correlation(to_disk(1e-6 * components))  # Near 0: Euclidean.


def _average_ranks(x: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
    """Ranks, averaged among ties; importing SciPy's `rankdata` takes longer than ranking."""
    _, inverse, counts = np.unique(x, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - counts / 2)[inverse]


@jax.jit
def _step(
    tangents: Float[Array, "n 2"],
    rows: Int[Array, " block"],
    rate: Float[Array, ""],
    all_targets: Float[Array, "n n"] | None,
    points: Float[Array, "n d"],
    space: Space,
    scaling: _Scaling,
) -> Float[Array, "n 2"]:
    """Moves a block of n points to lower its stress, Σ (drawn − target)² / 4n over its pairs."""
    # A scan over steps would compute the same, but XLA gathers targets on a CPU 4 times as slowly.
    if all_targets is None:
        targets = _target_distances(points[rows], points[rows], space, scaling)
    else:
        targets = all_targets[rows[:, None], rows]
    # The gradient in closed form: automatic differentiation takes 7 times as long.
    lifted, pull_back = jax.vjp(_lift, tangents[rows])
    mirrored = lifted * jnp.array([[1, -1, -1]], lifted.dtype)
    cosh = inner_products(lifted, mirrored)
    apart = (cosh > _LEAST_COSH) & ~jnp.eye(len(rows), dtype=bool)  # Equal points do not move.
    cosh = jnp.maximum(cosh, _LEAST_COSH)
    sinh = jnp.sqrt(cosh - 1) * jnp.sqrt(cosh + 1)  # The square may overflow.
    slopes = jnp.where(apart, (jnp.log(cosh + sinh) - targets) / sinh, 0)
    (gradient,) = pull_back(slopes @ mirrored / len(rows))
    lengths = jnp.linalg.norm(gradient, axis=1, keepdims=True)
    moves = gradient / jnp.maximum(lengths / _LARGEST_MOVE, 1)
    return tangents.at[rows].add(-rate * moves)


@jax.jit
def _target_distances(
    x: Float[Array, "n d"], y: Float[Array, "m d"], space: Space, scaling: _Scaling
) -> Float[Array, "n m"]:
    """Distances in the disk that a layout aims at, between all pairs of points."""
    nearest, scale = scaling
    distances = scale * jnp.maximum(space.distance_matrix(x, y) - nearest, 0)
    return jnp.minimum(distances, 2 * _FARTHEST)


def _lift(tangents: Float[Array, "n 2"]) -> Float[Array, "n 3"]:
    """Maps tangents at the origin to points of the hyperboloid, time coordinate first."""
    lengths = jnp.sqrt(jnp.sum(tangents**2, axis=1, keepdims=True) + _SMALLEST)
    bounded = jnp.minimum(lengths, _FARTHEST)
    return jnp.concatenate([jnp.cosh(bounded), tangents * (jnp.sinh(bounded) / lengths)], axis=1)
