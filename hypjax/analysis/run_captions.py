"""Searches of a run's test images by their captions, and of the captions by images; their radii."""

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from hypjax.analysis.run_hits import RunSearches, Search
from hypjax.experiment.captions import caption_relevance, distinct_captions
from hypjax.geometry import Space, cones, lorentz
from hypjax.objectives.captions import hyperboloids
from hypjax.retrieval import nearest_neighbors
from hypjax.retrieval.inputs import Rows


class CaptionSearches(NamedTuple):
    """Searches among a run's test images and their captions, in both directions."""

    texts: list[str]
    by_text: list[Search]  # For each text; hits are images.
    by_image: list[Search]  # For each image; hits are texts.
    facts: dict[str, str]  # Radii and entailment, by name; {} in a space without cones.


def search_captions(searches: RunSearches, k: int) -> CaptionSearches | None:
    """Finds the k nearest test images of each caption, and captions of each image.

    Returns None for a run without captions.
    """
    run, images, space = searches.run, searches.run.splits.test, searches.space
    if run.texts is None or images.captions is None:
        return None
    points, texts = searches.points, run.caption_points(searches.params, images, space)
    images_of, texts_of = caption_relevance(images)
    by_text = _searches(texts, points, images_of, k, space)
    by_image = _searches(points, texts, texts_of, k, space)
    owners = np.repeat(np.arange(len(images)), [*map(len, texts_of)])
    facts = _facts(space, points, texts, (owners, np.concatenate(texts_of)))
    return CaptionSearches(distinct_captions(images), by_text, by_image, facts)


def _searches(
    queries: Float[np.ndarray, "q d"],
    gallery: Float[np.ndarray, "n d"],
    positives: Sequence[Rows],
    k: int,
    space: Space,
) -> list[Search]:
    distances, rows = nearest_neighbors(queries, gallery, k=min(k, len(gallery)), space=space)
    results = zip(rows, distances, positives, strict=True)
    return [
        Search(i, hits.tolist(), hit_distances.tolist(), np.isin(hits, right).tolist())
        for i, (hits, hit_distances, right) in enumerate(results)
    ]


def _facts(
    space: Space,
    images: Float[np.ndarray, "images d"],
    texts: Float[np.ndarray, "texts d"],
    pairs: tuple[Rows, Rows],
) -> dict[str, str]:
    """Radii, and the share of pairs, rows of images and texts, whose text's cone has the image.

    In a product, radii and shares are means over its hyperbolic parts, as in the loss.
    """
    parts = [*zip(hyperboloids(space, images), hyperboloids(space, texts), strict=True)]
    if not parts:
        return {}
    facts = {}
    for side, name in enumerate(("images", "captions")):
        radii = [lorentz.dist(jnp.zeros_like(part[side][0]), *part[side]) for part in parts]
        low, middle, high = np.percentile(np.mean(radii, axis=0), (10, 50, 90))
        facts[f"radius of {name} (10% to 90%)"] = f"{middle:.3f} ({low:.3f} to {high:.3f})"
    owners, rows = pairs
    held = [
        cones.exterior_angle(y[rows], x[owners], c) <= cones.half_aperture(y[rows], c)
        for (x, c), (y, _) in parts
    ]
    return facts | {"pairs with the image in the caption's cone": f"{float(np.mean(held)):.3f}"}
