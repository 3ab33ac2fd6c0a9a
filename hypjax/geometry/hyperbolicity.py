"""How nearly a set of points is a tree: Gromov's δ, and the curvature that it suggests.

Trees have δ = 0; the flatter a space is, the larger is its δ beside its diameter.

Sources: Fournier et al., "Computing the Gromov hyperbolicity of a discrete metric space"
(Information Processing Letters, 2015), for δ by a max-min product; Khrulkov et al., "Hyperbolic
Image Embeddings" (CVPR 2020), for the relative δ and the curvature.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int, PRNGKeyArray

from hypjax.errors import UserError

# Relative δ of the Poincaré disk of curvature −1, cut off where float32 ends (Khrulkov et al.).
_DISK = 0.144
_FEWEST = 4  # Any three points lie on a tree.
_TILE = 512  # Largest side of the tiles of a product, which a CPU's cache holds.
_CHUNK = 16  # Terms that are added to a tile at a time.


def gromov_delta(distances: Float[ArrayLike, "n n"]) -> Float[Array, ""]:
    """Gromov's δ of a finite metric space, seen from its first point.

    With the Gromov products M_ij = (d_0i + d_0j − d_ij)/2 it is the largest element of
    (M ⊗ M) − M, where (A ⊗ A)_ij = max_k min(A_ik, A_kj). The δ of the four-point condition, which
    favours no point, is the largest of those seen from each, and at most twice any of them
    (Fournier et al.).

    Takes O(n³) time and O(n²) memory. It can be jitted.

    Args:
        distances: Symmetric; what is on the diagonal, where rounding shows, counts as 0.

    Returns:
        δ in float32, or float64 where the input is; NaN if a distance is not finite.

    Raises:
        UserError: The matrix is not square, or there are fewer than 4 points.
    """
    distances = jnp.asarray(distances)
    if distances.ndim != 2 or distances.shape[0] != distances.shape[1]:
        raise UserError(f"distances must be a square matrix, got shape {distances.shape}")
    _check_number(len(distances))
    return _delta(distances.astype(jnp.result_type(jnp.float32, distances)))


def relative_delta(
    points: Float[ArrayLike, "n d"],
    *,
    num_samples: int = 2000,
    num_trials: int = 100,
    key: PRNGKeyArray,
) -> Float[np.ndarray, " num_trials"]:
    """Relative δ of points, 2δ/diameter with Euclidean distances, of random draws.

    It lies between 0 (a tree) and 1, and scaling or moving the points does not change it.

    Args:
        points: Rows of coordinates, before any map into a hyperbolic space.
        num_samples: Points of a draw, without replacement. With no more points than this, every
            draw is all of them in their order: the draws coincide, and one is computed.
        num_trials: Number of draws.
        key: Of the draws. More trials with the same key begin with the same draws.

    Returns:
        The value of each draw in float32, for a mean and a deviation.

    Raises:
        UserError: Points are not [n, d] floating-point numbers, not finite or fewer than 4; those
            of a draw are all the same; or an argument is too small.
    """
    points = _checked(points)
    if num_samples < _FEWEST:
        raise UserError(f"num_samples must be at least {_FEWEST}, got {num_samples}")
    if num_trials < 1:
        raise UserError(f"num_trials must be at least 1, got {num_trials}")
    if len(points) <= num_samples:
        return np.full(num_trials, _relative_delta(_normalised(points)), np.float32)
    deltas = np.empty(num_trials, np.float32)
    for trial in range(num_trials):
        drawn = _draw(jax.random.fold_in(key, trial), len(points), num_samples)
        deltas[trial] = _relative_delta(_normalised(points[drawn]))
    return deltas


def curvature_from_delta(delta: float) -> float:
    """Negative curvature c = (0.144/δ_rel)² of a ball for data of this relative δ.

    It gives the Poincaré ball the relative δ of the data (Khrulkov et al.).

    Args:
        delta: A relative δ, such as the mean over draws.

    Raises:
        UserError: δ is not a positive number; at 0, that of a tree, c is infinite.
    """
    if not 0 < delta < np.inf:
        raise UserError(f"only a positive relative delta gives a curvature, got {delta:g}")
    return (_DISK / float(delta)) ** 2


def _checked(points: Float[ArrayLike, "n d"]) -> Float[np.ndarray, "n d"]:
    points = np.asarray(points)
    if points.ndim != 2 or 0 in points.shape:
        raise UserError(f"points must be [number, dimension], got shape {points.shape}")
    if not jnp.issubdtype(points.dtype, jnp.floating):
        raise UserError(f"points must be floating-point numbers, got {points.dtype}")
    _check_number(len(points))
    flawed = np.flatnonzero(~np.isfinite(points).all(axis=1))
    if len(flawed):
        raise UserError(f"point {flawed[0]} is not finite ({len(flawed)} of {len(points)} rows)")
    return points


def _check_number(points: int) -> None:
    if points < _FEWEST:
        raise UserError(f"hyperbolicity needs at least {_FEWEST} points, got {points}")


def _draw(key: PRNGKeyArray, points: int, number: int) -> Int[np.ndarray, " number"]:
    return np.asarray(jax.random.choice(key, points, (number,), replace=False))


def _normalised(points: Float[np.ndarray, "n d"]) -> Float[np.ndarray, "n d"]:
    """Moves the first point to the origin and scales the largest coordinate to 1.

    In float64, so that afterwards float32 holds the digits in which points differ, however far out
    they lie, and squares neither overflow nor vanish.

    Raises:
        UserError: The points are all the same.
    """
    moved = points.astype(np.float64) - points[0].astype(np.float64)
    largest = np.abs(moved).max()
    if largest == 0:
        raise UserError(
            f"the {len(points)} points drawn are all the same: with a diameter of 0 there is no "
            "relative delta"
        )
    return (moved / largest).astype(np.float32)


@jax.jit
def _relative_delta(points: Float[Array, "n d"]) -> Float[Array, ""]:
    distances = _distances(points)
    return 2 * _delta(distances) / jnp.max(distances)


def _distances(points: Float[Array, "n d"]) -> Float[Array, "n n"]:
    """Euclidean distances by subtraction, exact for close points, and 0 on the diagonal.

    Inner products leave errors of 3e-4 of the diameter there, which the relative δ of a line shows.
    """
    n, dim = points.shape
    coordinates = jnp.pad(points.T, ((0, _round_up(dim, _CHUNK) - dim), (0, 0)))
    zeros = jnp.zeros((n, n), points.dtype)
    return jnp.sqrt(_fold(lambda s, x, y: s + (x - y) ** 2, coordinates, 0, 0, zeros))


@jax.jit
def _delta(distances: Float[Array, "n n"]) -> Float[Array, ""]:
    """See `gromov_delta`. Of tiles that mirror each other, one is computed: M ⊗ M is symmetric."""
    products = _gromov_products(distances)
    side = _side(len(distances))
    rows, columns = (jnp.asarray(side * tiles) for tiles in np.triu_indices(len(products) // side))

    def visit(tile: Int[Array, ""], delta: Float[Array, ""]) -> Float[Array, ""]:
        row, column = rows[tile], columns[tile]
        zeros = jnp.zeros((side, side), products.dtype)  # The product's least, as row 0 of M is 0.
        product = _fold(_max_min, products, row, column, zeros)
        part = lax.dynamic_slice(products, (row, column), (side, side))
        return jnp.maximum(delta, jnp.max(product - part))

    delta = lax.fori_loop(0, len(rows), visit, jnp.zeros((), products.dtype))
    return jnp.where(jnp.all(jnp.isfinite(distances)), delta, jnp.nan)


def _gromov_products(distances: Float[Array, "n n"]) -> Float[Array, "p p"]:
    """M_ij = (d_0i + d_0j − d_ij)/2, padded to whole tiles.

    Row 0 is 0, so that padding with 0 repeats the first point, which leaves δ as it is.
    """
    distances = jnp.where(jnp.eye(len(distances), dtype=bool), 0, distances)
    products = (distances[0][:, None] + distances[0] - distances) / 2
    side = _side(len(products))
    return jnp.pad(products, (0, _round_up(len(products), side) - len(products)))


def _side(points: int) -> int:
    """Side of the tiles: at most `_TILE`, and little to pad."""
    tiles = -(-points // _TILE)
    return _round_up(-(-points // tiles), _CHUNK)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _max_min(best: Array, x: Array, y: Array) -> Array:
    """max(best, min(x, y)): by comparisons, as maximum and minimum take twice as long over NaN."""
    smaller = jnp.where(x < y, x, y)
    return jnp.where(best > smaller, best, smaller)


def _fold(
    combine: Callable[[Array, Array, Array], Array],
    vectors: Float[Array, "k p"],
    row: int | Int[Array, ""],
    column: int | Int[Array, ""],
    tile: Float[Array, "h w"],
) -> Float[Array, "h w"]:
    """A tile of a matrix product, with other operations in place of + and ·.

    A chunk of terms becomes one fused loop over the tile, which makes no other matrix. Each is
    looked up one step ahead: otherwise XLA, on a CPU, may look it up again for every element,
    which is up to eight times slower.

    Args:
        combine: From an element of the tile and its two factors to the next value.
        vectors: A multiple of `_CHUNK`.
        row: Where in the vectors the left factors begin.
        column: Where in the vectors the right factors begin.
        tile: What is changed by each term in turn.
    """
    height, width = tile.shape

    def look(step: int | Int[Array, ""]) -> tuple[Float[Array, "c h"], Float[Array, "c w"]]:
        chunk = lax.dynamic_slice_in_dim(vectors, step * _CHUNK, _CHUNK)
        left = lax.dynamic_slice_in_dim(chunk, row, height, axis=1)
        return left, lax.dynamic_slice_in_dim(chunk, column, width, axis=1)

    def step(i: Int[Array, ""], carried: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        tile, left, right = carried
        for x, y in zip(left, right, strict=True):
            tile = combine(tile, x[:, None], y)
        return tile, *look(i + 1)

    return lax.fori_loop(0, len(vectors) // _CHUNK, step, (tile, *look(0)))[0]
