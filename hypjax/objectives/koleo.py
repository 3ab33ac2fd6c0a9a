"""KoLeo, a regulariser that spreads the images of a batch apart."""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from hypjax.geometry import Space
from hypjax.objectives.comparisons import SPHERE, Labels

_SMALLEST = 1e-8  # Distance below which points do not repel each other.


def koleo(
    points: Float[ArrayLike, "n dim"], *, space: Space = SPHERE, ids: Labels | None = None
) -> Float[Array, ""]:
    """KoLeo, −(1/n) Σ_i log min_{j≠i} d(i, j), an estimate of the differential entropy.

    From Sablayrolles et al. (ICLR 2019, Eq. 2) and IRT (El-Nouby et al., 2021), who use it on the
    sphere, where d is the Euclidean distance. In the ball d is the geodesic distance.

    The nearest point is found by inner products; its distance is computed by subtraction, which
    keeps the digits of small distances. In float32, another point may be taken for the nearest if
    their distances differ by less than about 1e-3. Distances below 1e-8 count as 1e-8, without a
    gradient. Fewer than two points are a `ValueError`.

    `ids` identify the image of each point; by default, all points are different images. An image
    that occurs twice in a batch, as a negative of two tuples, is not pushed away from itself.
    """
    points = jnp.asarray(points)
    if len(points) < 2:
        raise ValueError(f"needs two points or more, got {len(points)}")
    fixed = lax.stop_gradient(points)
    ids = jnp.asarray(np.arange(len(points)) if ids is None else ids)
    itself = ids[:, None] == ids
    nearest = jnp.argmin(jnp.where(itself, jnp.inf, space.distance_matrix(fixed, fixed)), axis=1)
    distances = space.distance(points, points[nearest])
    power = 2 if space.squared else 1
    return -jnp.mean(jnp.log(jnp.maximum(distances, _SMALLEST**power))) / power
