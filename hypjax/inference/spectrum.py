"""How embeddings spread: their principal components, and similarities of images (IRT, Analysis)."""

import jax
import numpy as np
from jaxtyping import Float, Int

from hypjax.geometry import Space, Sphere
from hypjax.reports.spectrum import Similarities, Spread
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
    """Counts the pairs of images in each interval of similarity."""
    edges = np.linspace(-1.0 if isinstance(space, Sphere) else 0.0, 1.0, BINS + 1)
    compare = jax.jit(lambda x, y: space.similarity(space.distance_matrix(x, y)))
    counts, sums = np.zeros((2, BINS), int), np.zeros(2)
    for start in range(0, len(points), _BLOCK):
        block = slice(start, start + _BLOCK)
        found = np.clip(np.asarray(compare(points[block], points), np.float64), edges[0], 1)
        same = labels[block, None] == labels
        later = np.arange(len(points)) > np.arange(len(points))[block, None]  # Each pair once.
        for i, pairs in enumerate((same & later, ~same & later)):
            counts[i] += np.histogram(found[pairs], edges)[0]
            sums[i] += found[pairs].sum()
    return Similarities(edges, *counts, *(sums / counts.sum(axis=1)))
