"""Gromov's δ, which measures how close a set of points is to a tree, and the curvature it suggests.

A tree has δ = 0. The less hyperbolic a space is, the larger its δ relative to its diameter.

Sources: Fournier et al., "Computing the Gromov hyperbolicity of a discrete metric space"
(Information Processing Letters, 2015), for δ as a max-min product; Khrulkov et al., "Hyperbolic
Image Embeddings" (CVPR 2020), for the relative δ and the curvature derived from it.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int, PRNGKeyArray

from hypjax.errors import UserError
from hypjax.geometry.arithmetic import floating

# Relative δ of the Poincaré disk of curvature −1, truncated where float32 ends (Khrulkov et al.).
_DISK_DELTA = 0.144
_TILE = 512  # Largest side of a tile of the product, so that it fits into a CPU's cache.
_CHUNK = 16  # Terms of the product that are reduced into a tile at a time.


def gromov_delta(distances: Float[ArrayLike, "..."]) -> Float[Array, ""]:
    """Gromov's δ of a finite metric space, with its first point as the base point.

    With the Gromov products M_ij = (d_0i + d_0j − d_ij)/2, δ is the largest element of
    (M ⊗ M) − M, where (A ⊗ B)_ij = max_k min(A_ik, B_kj). The δ of the four-point condition is the
    maximum over all base points and at most twice the δ at any of them (Fournier et al.).

    Takes O(n³) time and O(n²) memory, and can be jitted. The diagonal counts as 0, even if rounding
    left other values there. δ is NaN if a distance is not finite. Raises a `UserError` if the
    matrix is not square or has fewer than 4 points.
    """
    distances = jnp.asarray(distances)
    if distances.ndim != 2 or distances.shape[0] != distances.shape[1]:
        raise UserError(f"distances must be a square matrix, got shape {distances.shape}")
    _require_four_points(distances)
    return _delta(*floating(distances))


def relative_delta(
    points: Float[ArrayLike, "n d"],
    *,
    num_samples: int = 2000,
    num_trials: int = 100,
    key: PRNGKeyArray,
) -> Float[np.ndarray, " num_trials"]:
    """Relative δ of random samples of points: 2δ/diameter with Euclidean distances.

    The relative δ is between 0 (a tree) and 1 (Khrulkov et al.), and invariant to scaling and
    translation. Points are floats, [n, d], before any map into a hyperbolic space. Each trial draws
    a sample without replacement; with the same key, more trials begin with the same samples. If
    there are at most `num_samples` points, every sample holds all points in their order. Raises a
    `UserError` for fewer than 4 points, a point that is not finite, or a sample of equal points.
    """
    points = np.asarray(points)
    _require_four_points(points)
    if not np.isfinite(points).all():
        raise UserError("some points are not finite, so they have no relative delta")
    if len(points) <= num_samples:
        return np.full(num_trials, _relative_delta(_normalise(points)), np.float32)
    deltas = np.empty(num_trials, np.float32)
    for trial in range(num_trials):
        trial_key = jax.random.fold_in(key, trial)
        sampled = jax.random.choice(trial_key, len(points), (num_samples,), replace=False)
        deltas[trial] = _relative_delta(_normalise(points[np.asarray(sampled)]))
    return deltas


def curvature_from_delta(delta: float) -> float:
    """Curvature c = (0.144/δ_rel)² of the ball with a given relative δ (Khrulkov et al.).

    `delta` is the data's relative δ, such as the mean of `relative_delta`. It must be finite and
    above 0, or a `UserError` is raised: for a tree, δ = 0 and c would be infinite.
    """
    if not 0 < delta < np.inf:
        raise UserError(f"a curvature needs a positive relative delta, got {delta:g}")
    return (_DISK_DELTA / float(delta)) ** 2


def _require_four_points(points: Array | np.ndarray) -> None:
    if len(points) < 4:  # Any three points embed in a tree.
        raise UserError(f"hyperbolicity needs at least 4 points, got {len(points)}")


def _normalise(points: Float[np.ndarray, "n d"]) -> Float[np.ndarray, "n d"]:
    """Moves the first point to the origin, and scales the largest coordinate to 1."""
    # In float32, points far from the origin would lose the digits in which they differ.
    translated = points.astype(np.float64) - points[0].astype(np.float64)
    largest = np.abs(translated).max()
    if largest == 0:
        raise UserError(f"all {len(points)} sampled points are identical, so they have no delta")
    return (translated / largest).astype(np.float32)


@jax.jit
def _relative_delta(points: Float[Array, "n d"]) -> Float[Array, ""]:
    # Inner products would leave errors of 3e-4 of the diameter, visible in the δ of a line.
    n, dim = points.shape
    coordinates = jnp.pad(points.T, ((0, -dim % _CHUNK), (0, 0)))
    zeros = jnp.zeros((n, n), points.dtype)
    distances = jnp.sqrt(_fold(lambda s, x, y: s + (x - y) ** 2, coordinates, 0, 0, zeros))
    return 2 * _delta(distances) / jnp.max(distances)


@jax.jit
def _delta(distances: Float[Array, "n n"]) -> Float[Array, ""]:
    """Gromov's δ of a distance matrix, from the upper tiles of M ⊗ M, which is symmetric."""
    masked = jnp.where(jnp.eye(len(distances), dtype=bool), 0, distances)
    products = (masked[0][:, None] + masked[0][None] - masked) / 2  # Gromov products, M.
    tiles_per_side = -(-len(distances) // _TILE)
    side = -(-len(distances) // (tiles_per_side * _CHUNK)) * _CHUNK  # Chosen for little padding.
    # Row 0 is 0, so padding to whole tiles with 0 repeats the first point and does not change δ.
    products = jnp.pad(products, (0, -len(products) % side))
    rows, columns = (jnp.asarray(side * tiles) for tiles in np.triu_indices(len(products) // side))

    def visit(tile: Int[Array, ""], delta: Float[Array, ""]) -> Float[Array, ""]:
        row, column = rows[tile], columns[tile]
        zeros = jnp.zeros((side, side), products.dtype)  # A lower bound: row 0 of M is 0.
        product = _fold(_max_min, products, row, column, zeros)
        gromov_tile = lax.dynamic_slice(products, (row, column), (side, side))
        return jnp.maximum(delta, jnp.max(product - gromov_tile))

    delta = lax.fori_loop(0, len(rows), visit, jnp.zeros((), products.dtype))
    return jnp.where(jnp.all(jnp.isfinite(distances)), delta, jnp.nan)


def _max_min(best: Array, x: Array, y: Array) -> Array:
    """max(best, min(x, y)) by comparisons: half the time of jnp.maximum, which propagates NaN."""
    smaller = jnp.where(x < y, x, y)
    return jnp.where(best > smaller, best, smaller)


def _fold(
    combine: Callable[[Array, Array, Array], Array],
    vectors: Float[Array, "k p"],
    row: int | Int[Array, ""],
    column: int | Int[Array, ""],
    tile: Float[Array, "h w"],
) -> Float[Array, "h w"]:
    """Computes a tile of VᵀV for the matrix V of `vectors`, with `combine` in place of + and ·.

    For each row v of V, element (i, j) becomes `combine(element, v[row + i], v[column + j])`. The
    number of rows, k, is a multiple of `_CHUNK`.
    """
    # A chunk of terms becomes one fused loop over the tile, without intermediate matrices. Chunks
    # are loaded one step ahead: otherwise XLA on a CPU may load them again for every element, which
    # is up to eight times slower.
    height, width = tile.shape

    def load(index: int | Int[Array, ""]) -> tuple[Float[Array, "c h"], Float[Array, "c w"]]:
        chunk = lax.dynamic_slice_in_dim(vectors, index * _CHUNK, _CHUNK)
        left = lax.dynamic_slice_in_dim(chunk, row, height, axis=1)
        return left, lax.dynamic_slice_in_dim(chunk, column, width, axis=1)

    def step(index: Int[Array, ""], carry: tuple[Array, ...]) -> tuple[Array, ...]:
        tile, left, right = carry
        for x, y in zip(left, right, strict=True):
            tile = combine(tile, x[:, None], y[None])
        return tile, *load(index + 1)

    return lax.fori_loop(0, len(vectors) // _CHUNK, step, (tile, *load(0)))[0]
