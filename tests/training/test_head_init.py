"""The head that starts from the principal components of the training images' features."""

import numpy as np
import pytest

from hypjax.errors import UserError
from hypjax.training.states import pca_head


def features(images, dim):
    draw = np.random.default_rng(0)
    return (draw.normal(size=(images, dim)) @ draw.normal(size=(dim, dim)) + 3).astype(np.float32)


def shrunk_covariance(x):
    """Ledoit and Wolf (2004), equations 14 and Lemmas 3.2 to 3.4, with a loop over the images."""
    n, d = x.shape
    sample = sum(np.outer(row, row) for row in x) / n
    identity = np.trace(sample) / d * np.eye(d)
    distance = np.sum((sample - identity) ** 2)
    error = sum(np.sum((np.outer(row, row) - sample) ** 2) for row in x) / n**2
    share = min(error, distance) / distance
    return share * identity + (1 - share) * sample


@pytest.mark.parametrize(("images", "dim", "head_dim"), [(200, 6, 6), (200, 6, 4), (5, 8, 8)])
def test_coordinates_are_halfway_to_whitened_by_the_covariance_of_ledoit_and_wolf(
    images, dim, head_dim
):
    """For 5 images in 8 dimensions, too, where their own covariance is singular."""
    encoded = features(images, dim)
    head = pca_head(encoded, head_dim)
    coordinates = encoded @ head["kernel"].astype(np.float64) + head["bias"]
    np.testing.assert_allclose(coordinates.mean(0), 0, atol=1e-4)
    np.testing.assert_allclose(np.mean(np.sum(coordinates**2, axis=1)), 4.6**2, rtol=1e-4)
    centred = encoded - encoded.mean(0, dtype=np.float64)
    variances, axes = np.linalg.eigh(shrunk_covariance(centred))
    variances, axes = variances[::-1][:head_dim], axes[:, ::-1][:, :head_dim]
    expected = centred @ axes / variances**0.25
    expected *= 4.6 / np.sqrt(np.mean(np.sum(expected**2, axis=1)))
    np.testing.assert_allclose(np.abs(coordinates), np.abs(expected), atol=1e-4)


def test_equal_features_are_refused():
    with pytest.raises(UserError, match="are equal"):
        pca_head(np.ones((3, 4), np.float32), 2)
