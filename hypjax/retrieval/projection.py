"""Fewer dimensions: principal components of embeddings, optionally whitened."""

import dataclasses
import hashlib
import pathlib
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from hypjax.errors import UserError, explained, writing
from hypjax.geometry import Space
from hypjax.retrieval import inputs
from hypjax.retrieval.inputs import Points
from hypjax.system.files import contiguous, read_npz, replacing

_BLOCK_BYTES = 32 * 2**20  # Largest size of a block of features, in float64.
# Directions with a smaller share of the features' root mean square hold only rounding errors.
_LEAST_DEVIATION = 2.0**-20


@dataclasses.dataclass(frozen=True, eq=False)
class Projection:
    """A projection of points on the principal components of their features.

    Components are orthonormal and sorted by descending variance. In each, the coordinate of largest
    absolute value is positive. `whiten` scales projected features to equal variances.
    """

    space: Space
    mean: Float[np.ndarray, " d"]  # Mean of the features. All arrays are float64.
    components: Float[np.ndarray, "dim d"]
    variances: Float[np.ndarray, " dim"]  # Variances of the features along the components.
    whiten: bool

    def apply(self, points: Float[ArrayLike, "n p"]) -> Float[np.ndarray, "n q"]:
        """Projects points and returns points of the same space, float32.

        The features of the points, minus the mean, are projected on the components and embedded
        again. On the sphere this is PCA followed by L2 normalisation, as in IRT (El-Nouby et al.,
        2021). Whitening gives each direction the mean of the variances, which keeps the lengths of
        features: lengths count in a ball.
        """
        points, _ = inputs.check_points(points, points)
        blocks = []
        for features in _features(self.space, points):
            if features.shape[1] != len(self.mean):  # One feature would be broadcast.
                counts = f"{features.shape[1]} features, the projection takes {len(self.mean)}"
                raise UserError(f"the points have {counts}")
            projected = (features - self.mean) @ self._axes
            blocks.append(np.asarray(self.space.embed(projected.astype(np.float32))))
        return np.concatenate(blocks)

    def project(self, points: Float[Array, "n p"]) -> Float[Array, "n d"]:
        """Projects points of the space, unchecked, by functions that JAX can trace."""
        features = self.space.features(points)
        axes = jnp.asarray(self._axes, features.dtype)
        return self.space.embed((features - jnp.asarray(self.mean, features.dtype)) @ axes)

    @property
    def _axes(self) -> Float[np.ndarray, "features d"]:
        """The components, scaled for whitening."""
        scales = np.sqrt(np.mean(self.variances) / self.variances) if self.whiten else 1.0
        return self.components.T * scales

    def fingerprint(self, embeddings: str) -> str:
        """Fingerprint of projected embeddings: the projection's and the input's."""
        digest = hashlib.sha256(f"{embeddings} {self.whiten}".encode())
        for array in (self.mean, self.components, self.variances):
            digest.update(contiguous(array).data)
        return digest.hexdigest()[:32]

    def save(self, path: pathlib.Path) -> None:
        """Writes mean, components, variances and `whiten` to an .npz file, atomically."""
        mean, components, variances = map(contiguous, (self.mean, self.components, self.variances))
        with writing(path), replacing(path) as temporary, temporary.open("wb") as file:
            np.savez(
                file,
                mean=mean,
                components=components,
                variances=variances,
                whiten=np.array(self.whiten),
            )

    @classmethod
    def load(cls, path: pathlib.Path, space: Space) -> "Projection":
        """Reads a file that `save` wrote; raises UserError if it is damaged."""
        with explained(f"cannot read the projection {path}"):
            arrays = read_npz(path)
            mean, components, variances, whiten = (
                arrays[name] for name in ("mean", "components", "variances", "whiten")
            )
            return cls(space, mean, components, variances, bool(whiten))


def fit(
    points: Float[ArrayLike, "n p"], *, space: Space, dim: int, whiten: bool = False
) -> Projection:
    """Fits a projection on the first `dim` principal components of points, in float64.

    Mean and covariance of `Space.features` are summed in blocks, so points may be memory-mapped.
    Raises UserError if `dim` exceeds the number of features or of points, if the points do not
    vary, or if whitening needs a direction in which they do not vary.
    """
    points, _ = inputs.check_points(points, points)
    n = len(points)
    mean = np.sum([features.sum(axis=0) for features in _features(space, points)], axis=0) / n
    if not (1 <= dim <= min(n, len(mean)) and np.isfinite(mean).all()):
        kind = f"{n} of {len(mean)}"
        raise UserError(f"PCA to {dim} dimensions needs as many finite points; got {kind}")
    scatter = np.zeros((len(mean), len(mean)))
    sum_of_squares = 0.0
    for features in _features(space, points):
        sum_of_squares += np.sum(features**2)
        features -= mean
        scatter += features.T @ features
    variances, directions = np.linalg.eigh(scatter / max(n - 1, 1))
    variances, components = variances[::-1][:dim], directions.T[::-1][:dim]
    num_varying = int(np.count_nonzero(variances > _LEAST_DEVIATION**2 * sum_of_squares / n))
    if num_varying < (needed := dim if whiten else 1):
        raise UserError(f"the points vary along {num_varying} components; this PCA needs {needed}")
    largest = np.argmax(np.abs(components), axis=1)
    components = components * np.sign(components[np.arange(dim), largest])[:, None]
    return Projection(space, mean, components, np.maximum(variances, 0), whiten)


def _features(space: Space, points: Points) -> Iterator[Float[np.ndarray, "b d"]]:
    """Yields the points' features in blocks, in float64."""
    for rows in inputs.blocks(len(points), _BLOCK_BYTES // (8 * points.shape[1])):
        with jax.enable_x64(True):
            yield np.array(space.features(np.asarray(points[rows], np.float64)))
