"""Scores of searches for images by their captions, and for captions by their images."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from hypjax.data.dataset import Dataset
from hypjax.data.sentences import TextVectors, text_vectors
from hypjax.data.splits import Splits
from hypjax.errors import UserError
from hypjax.geometry import Space
from hypjax.retrieval import Relevance, relevance_scores
from hypjax.retrieval.metrics import metric_names


def distinct_captions(images: Dataset) -> list[str]:
    """The captions of images, each once."""
    assert images.captions is not None
    return sorted({text for captions in images.captions for text in captions})


def caption_vectors(splits: Splits, name: str, encoder: str | None) -> TextVectors:
    """Vectors of the captions of all images of a dataset; checks that each image has captions."""
    tables = [x for x in (splits.train, splits.validation, splits.test, splits.gallery) if x]
    captions: set[str] = set()
    for images in tables:
        if images.captions is None or not all(images.captions):
            advice = "--config.data.captions, or prepare the dataset again"
            raise UserError(f"{name} has images without captions; name a file by {advice}")
        captions |= {*distinct_captions(images)}
    if splits.test.caption_vectors is not None:
        return splits.test.caption_vectors
    return text_vectors(str(encoder), sorted(captions))


def caption_scores(
    images: Dataset,
    points: Float[np.ndarray, "images d"],
    texts: Float[np.ndarray, "texts d"],
    *,
    space: Space,
    ks: Sequence[int],
) -> dict[str, Float[np.ndarray, " queries"]]:
    """Recall@K and mean average precision of each query, in both directions.

    `texts` are the points of `distinct_captions`. All images that a text describes are its hits,
    and all captions of an image are the image's, in names such as "text_to_image/recall@1".
    """
    row_of = {text: row for row, text in enumerate(distinct_captions(images))}
    assert images.captions is not None
    texts_of = [np.array([row_of[text] for text in own]) for own in images.captions]
    images_of: list[list[int]] = [[] for _ in row_of]
    for image, rows in enumerate(texts_of):
        for row in rows:
            images_of[row].append(image)
    searches = {
        "text_to_image": (texts, points, Relevance([*map(np.array, images_of)])),
        "image_to_text": (points, texts, Relevance(texts_of)),
    }
    scores: dict[str, Float[np.ndarray, " queries"]] = {}
    for direction, (queries, gallery, relevance) in searches.items():
        names = metric_names(("map", "recall"), [k for k in ks if k <= len(gallery)])
        found = relevance_scores(queries, gallery, relevance, metrics=names, space=space)
        scores |= {f"{direction}/{name}": values for name, values in found.items()}
    return scores
