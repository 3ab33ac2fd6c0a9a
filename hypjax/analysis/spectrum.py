"""How embeddings spread: their principal components, and similarities of images (IRT, Analysis)."""

from collections.abc import Iterator

import jax
import numpy as np
from jaxtyping import Float, Int

from hypjax.analysis.spectrum_result import Similarities, Spread
from hypjax.geometry import Space
from hypjax.objectives.comparisons import similarity
from hypjax.retrieval import projection

BINS = 100
_BLOCK = 512  # Points that are compared with all others at once.


def find_spread(
    points: Float[np.ndarray, "images dim"], labels: Int[np.ndarray, " images"], space: Space
) -> Spread:
    """Principal components of the points' features, and similarities of all pairs.

    Args:
        points: Points of the space, float32.
        labels: Class of each, from 0; some class has two images, and there are two classes.
        space: Their space.

    Raises:
        UserError: All points are equal.
    """
    features = space.features(points[:1]).shape[-1]
    dim = min(features, len(points))
    variances = projection.fit(points, space=space, dim=dim).variances
    return Spread(np.cumsum(variances) / np.sum(variances), _similarities(points, labels, space))


def _similarities(
    points: Float[np.ndarray, "images dim"], labels: Int[np.ndarray, " images"], space: Space
) -> Similarities:
    """Counts the pairs of images in equal intervals from the least similarity to the largest."""
    least, largest = np.inf, -np.inf
    for pairs in _pairs(points, labels, space):
        found = np.concatenate(pairs)
        least, largest = min(least, found.min()), max(largest, found.max())
    edges = np.linspace(least, largest, BINS + 1)
    counts, sums = np.zeros((2, BINS), int), np.zeros(2)
    for pairs in _pairs(points, labels, space):
        for i, found in enumerate(pairs):
            counts[i] += np.histogram(found, edges)[0]
            sums[i] += found.sum()
    return Similarities(edges, *counts, *(sums / counts.sum(axis=1)))


def _pairs(
    points: Float[np.ndarray, "images dim"], labels: Int[np.ndarray, " images"], space: Space
) -> Iterator[tuple[Float[np.ndarray, " same"], Float[np.ndarray, " other"]]]:
    """Yields the similarities of pairs of one class, and of different classes; each pair once."""
    compare = jax.jit(lambda x, y: similarity(space.distance_matrix(x, y)))
    numbers = np.arange(len(points))
    for start in range(0, len(points) - 1, _BLOCK):
        block = slice(start, start + _BLOCK)
        found = np.asarray(compare(points[block], points), np.float64)
        same, later = labels[block, None] == labels, numbers > numbers[block, None]
        yield found[same & later], found[~same & later]
