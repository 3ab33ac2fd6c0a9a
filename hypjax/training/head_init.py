"""Initialises a head from the principal components of the encoder's features."""

import numpy as np
from jaxtyping import Float

from hypjax.errors import UserError

# Root mean square of the projected features' norms: twice Hyp-ViT's clip radius, so that almost all
# are clipped, and the same learning rate suits all encoders.
_NORM = 4.6


def pca_head(features: Float[np.ndarray, "images dim"], dim: int) -> dict[str, np.ndarray]:
    """Computes a head that decorrelates features, and whitens them halfway.

    The head maps centred features to their principal components, by descending variance, each
    divided by the square root of its standard deviation. Full whitening, which divides by the
    standard deviation, would give directions of low variance, mostly noise, the same weight as
    others; without whitening, a few directions would dominate.

    Variances are shrunk towards their mean, more strongly for fewer images (Ledoit and Wolf, "A
    well-conditioned estimator for large-dimensional covariance matrices", 2004), so that directions
    in which the images do not vary remain.

    Returns {"kernel": [features' dim, dim], "bias": [dim]}, float32. Equal features are a
    `UserError`.
    """
    mean = features.mean(axis=0, dtype=np.float64)
    centred = features - mean
    n, d = centred.shape
    covariance = centred.T @ centred / n
    average = np.trace(covariance) / d
    if not average > 0:
        raise UserError(
            "the encoder's embeddings of the training images are equal, or not finite; check "
            "model.weights, or set model.head_init=orthogonal"
        )
    squares = np.sum(covariance**2)
    # Sums over all coefficients of the squared distance to `average` times the identity, and of
    # the covariance's squared error (Lemmas 3.2 to 3.4; there, norms are divided by d).
    distance = squares - d * average**2
    lengths = np.einsum("nd,nd->n", centred, centred)
    error = (np.mean(lengths**2) - squares) / n
    share = min(error / distance, 1.0)
    variances, directions = np.linalg.eigh(covariance)
    variances = (1 - share) * np.maximum(variances[::-1], 0) + share * average
    kernel = directions[:, ::-1][:, :dim] * variances[:dim] ** -0.25
    kernel *= _NORM / np.sqrt(np.sum(kernel * (covariance @ kernel)))
    return {"kernel": kernel.astype(np.float32), "bias": (-mean @ kernel).astype(np.float32)}
