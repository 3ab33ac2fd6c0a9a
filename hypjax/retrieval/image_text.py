"""Scores of images and texts that one model embeds in one space, and the walk to the root.

Zero-shot classification, retrieval and the walk follow MERU (Desai et al., ICML 2023); hierarchical
retrieval follows HierarCaps (Alper and Averbuch-Elor, ECCV 2024). All order points as an exact
search does, equally far points by index.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from hypjax.geometry import Space, cones, lorentz
from hypjax.retrieval.metrics import recall_at_k
from hypjax.retrieval.neighbors import nearest_neighbors
from hypjax.retrieval.subtraction import gallery_separations

Images = Float[np.ndarray, "n d"]  # Points of the space, as are:
Texts = Float[np.ndarray, "m d"]
ROOT = -1  # Stands for the root among the texts that a walk passes.
_TOP, _THRESHOLDS, _STEPS = 5, 50, 50


def zero_shot_scores(
    images: Images, labels: Int[np.ndarray, " n"], classes: Texts, *, space: Space
) -> tuple[dict[str, float], Int[np.ndarray, " n"]]:
    """Classifies each image by the nearest text of a class; returns scores and predicted classes.

    `labels` holds each image's row in `classes`. The scores accuracy and accuracy@5 are means over
    the classes that have images; image_accuracy is the share of images.
    """
    ranked = nearest_neighbors(images, classes, k=min(_TOP, len(classes)), space=space)[1]
    is_hit = ranked == labels[:, None]
    sizes = np.bincount(labels)
    means = [np.bincount(labels, hits)[sizes > 0] for hits in (is_hit[:, 0], is_hit.any(axis=1))]
    first, among_top = (float(np.mean(hits / sizes[sizes > 0])) for hits in means)
    image_accuracy = float(np.mean(is_hit[:, 0]))
    scores = {"accuracy": first, f"accuracy@{_TOP}": among_top, "image_accuracy": image_accuracy}
    return scores, ranked[:, 0]


def caption_recalls(
    images: Images,
    texts: Texts,
    image_of_text: Int[np.ndarray, " m"],
    *,
    ks: Sequence[int],
    space: Space,
) -> dict[str, dict[int, float]]:
    """Recall@K of images that search captions, and of captions that search images.

    `image_of_text` holds the row of each caption's image. An image hits if any of its captions is
    among the K nearest. Returns {direction: {K: recall}}; for errors see `recall_at_k`.
    """
    rows = np.arange(len(images))
    return {
        "image_to_text": recall_at_k(images, rows, texts, image_of_text, ks=ks, space=space),
        "text_to_image": recall_at_k(texts, image_of_text, images, rows, ks=ks, space=space),
    }


def hierarcaps_scores(
    images: Images,
    texts: Texts,
    chains: Int[np.ndarray, "chains levels"],
    image_of_chain: Int[np.ndarray, " chains"],
    root: Float[np.ndarray, " d"],
    *,
    space: Space,
) -> dict[str, float]:
    """Precision and recall of each image's texts on the way from the root, and d_corr.

    Chains of captions, from general to specific, are rows of `texts`, which are distinct. The
    radius of a text is the length of its distance from the root. At each of 50 thresholds, evenly
    from the least to the largest radius, an image finds the nearest text within the threshold, and
    finds it once. Precision is the share of found texts that are the image's; recall the share of
    levels of which a text of the image is found; d_corr the mean Kendall τ-b of the radii of a
    chain with its levels, 0 for equal radii.
    """
    from scipy.stats import kendalltau

    with jax.enable_x64(True):
        distances = space.distance(root.astype(np.float64), texts.astype(np.float64))
        radii = np.asarray(space.length(distances))
    is_outside = radii > np.linspace(radii.min(), radii.max(), _THRESHOLDS)[:, None]
    precisions, recalls = np.empty((2, len(images)))
    for copies, separations in gallery_separations(space, images, texts):
        found = np.unique(np.where(is_outside, np.inf, separations).argmin(axis=1))
        for image in copies:
            own = chains[image_of_chain == image]
            precisions[image] = np.isin(found, own).mean()
            recalls[image] = np.isin(own, found).any(axis=0).mean()
    levels = np.arange(chains.shape[1])
    correlations = [kendalltau(radii[chain], levels).statistic for chain in chains]
    d_corr = np.mean(np.nan_to_num(correlations))
    scores = {"precision": precisions.mean(), "recall": recalls.mean(), "d_corr": d_corr}
    return {name: float(score) for name, score in scores.items()}


def walk(
    image: Float[np.ndarray, " d"], texts: Texts, root: Float[np.ndarray, " d"], *, space: Space
) -> Int[np.ndarray, " 50"]:
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
