"""Scores of images and texts in one space, and the walk from an image to the root.

They follow MERU (Desai et al., ICML 2023) and HierarCaps (Alper and Averbuch-Elor, ECCV 2024), with
exact searches, in which equally far points come in the order of their rows.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from hypjax.geometry import Space, cones, lorentz
from hypjax.retrieval.inputs import GalleryPoints, Points, Rows
from hypjax.retrieval.neighbors import nearest_neighbors
from hypjax.retrieval.subtraction import gallery_separations

Point = Float[np.ndarray, " d"]
ROOT = -1  # Stands for the root among the texts that a walk passes.
_THRESHOLDS = _STEPS = 50


def zero_shot_scores(
    images: Points, labels: Rows, classes: GalleryPoints, *, space: Space
) -> tuple[dict[str, float], Rows]:
    """Classifies each image by the nearest text of a class; returns scores and predicted classes.

    `labels` holds each image's row in `classes`. The scores accuracy and accuracy@5 are means over
    the classes that have images; image_accuracy is the share of images.
    """
    ranked = nearest_neighbors(images, classes, k=min(5, len(classes)), space=space)[1]
    is_hit = ranked == labels[:, None]
    by_class = [is_hit[labels == label] for label in np.unique(labels)]
    scores = {
        "accuracy": np.mean([hits[:, 0].mean() for hits in by_class]),
        "accuracy@5": np.mean([hits.any(axis=1).mean() for hits in by_class]),
        "image_accuracy": is_hit[:, 0].mean(),
    }
    return {name: float(score) for name, score in scores.items()}, ranked[:, 0]


def hierarcaps_scores(
    images: Points,
    texts: GalleryPoints,
    chains: Int[np.ndarray, "chains levels"],
    owners: Int[np.ndarray, " chains"],
    root: Point,
    *,
    space: Space,
) -> dict[str, float]:
    """Precision, recall and d_corr of texts that images find on the way from the root.

    Chains of captions, from general to specific, are rows of `texts`, which are distinct; `owners`
    holds the row of each chain's image. At each of 50 thresholds, evenly from the least to the
    largest radius (the length of a text's distance from the root), an image finds the nearest text
    within it. Precision is the share of found texts that are the image's; recall the share of its
    levels that are found; d_corr the mean Kendall τ of a chain's radii and levels (0 if all equal).
    """
    from scipy.stats import kendalltau

    with jax.enable_x64(True):
        distances = space.distance(root.astype(np.float64), texts.astype(np.float64))
        radii = np.asarray(space.length(distances))
    is_outside = radii > np.linspace(radii.min(), radii.max(), _THRESHOLDS)[:, None]
    precisions, recalls = np.empty((2, len(images)))
    for copies, separations in gallery_separations(space, images, texts):
        found_texts = np.unique(np.where(is_outside, np.inf, separations).argmin(axis=1))
        for image in copies:
            image_chains = chains[owners == image]
            precisions[image] = np.isin(found_texts, image_chains).mean()
            recalls[image] = np.isin(image_chains, found_texts).any(axis=0).mean()
    levels = np.arange(chains.shape[1])
    taus = np.nan_to_num([kendalltau(radii[chain], levels).statistic for chain in chains])
    scores = {"precision": precisions, "recall": recalls, "d_corr": taus}
    return {name: float(np.mean(values)) for name, values in scores.items()}


def walk(image: Point, texts: GalleryPoints, root: Point, *, space: Space) -> Rows:
    """Finds the text nearest to each of 50 points from an image to the root; `ROOT` is the root.

    The points have evenly spaced features on a straight line: in hyperbolic space, vectors in the
    tangent space at the origin; on the sphere, vectors that are then scaled to length 1. In
    hyperbolic space, texts are left out whose entailment cone (K = 0.1) does not hold the point.
    """
    ball = space.ball()

    def nearest(point: Float[Array, " d"]) -> Int[Array, ""]:
        separations = space.separation(point, candidates)
        if ball is not None:
            inner = lorentz.from_poincare(space.to_ball(point), ball.c)
            apexes = lorentz.from_poincare(space.to_ball(candidates), ball.c)
            angles = cones.exterior_angle(apexes, inner, ball.c)
            is_left_out = (angles > cones.half_aperture(apexes, ball.c)).at[ROOT].set(False)
            separations = jnp.where(is_left_out, jnp.inf, separations)
        return jnp.argmin(separations)

    with jax.enable_x64(True):
        candidates = jnp.asarray(np.vstack([texts, root]), jnp.float64)  # The root comes last.
        ends = space.features(jnp.stack([jnp.asarray(image, jnp.float64), candidates[ROOT]]))
        weights = jnp.linspace(1, 0, _STEPS)[:, None]
        points = space.embed(weights * ends[:1] + (1 - weights) * ends[1:])
        rows = np.asarray(jax.lax.map(nearest, points))
    return np.where(rows == len(texts), ROOT, rows)
