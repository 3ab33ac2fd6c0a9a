"""Scores of searches for images by their captions, and for captions by their images."""

import itertools
import pathlib
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jaxtyping import Float, Int, Shaped

from hypjax.data import phrases
from hypjax.data.dataset import Dataset
from hypjax.data.sentences import (
    TextInputs,
    TextVectors,
    encoder_hash,
    sentence_encoder,
    text_vectors,
)
from hypjax.data.splits import Splits
from hypjax.errors import UserError
from hypjax.experiment.embedding import fingerprint
from hypjax.geometry import Space
from hypjax.models.tokens import open_tokenizer
from hypjax.parallel import processes
from hypjax.retrieval import Relevance, relevance_scores
from hypjax.retrieval.inputs import Rows
from hypjax.retrieval.metrics import metric_names
from hypjax.settings import TextSettings
from hypjax.types import CAPTIONS, TEXT_ENCODER


def distinct_captions(images: Dataset) -> list[str]:
    """The captions of images, each once."""
    assert images.captions is not None
    return sorted({text for captions in images.captions for text in captions})


def query_classes(images: Dataset, metric: str) -> Int[np.ndarray, " queries"]:
    """The class of each query of a metric; a text has that of the first image it describes."""
    if not metric.startswith("text_to_image/"):
        return images.labels
    assert images.captions is not None
    class_of: dict[str, int] = {}
    for captions, label in zip(images.captions, images.labels.tolist(), strict=True):
        for text in captions:
            class_of.setdefault(text, label)
    return np.array([class_of[text] for text in distinct_captions(images)])


def caption_parents(images: Dataset) -> dict[str, tuple[str, ...]]:
    """The sentences, phrases and nouns of each caption, see `hypjax.data.phrases`."""
    return {text: phrases.parents(text) for text in distinct_captions(images)}


def with_phrases(
    vectors: TextVectors, parents: Mapping[str, Sequence[str]], encoder: str | None
) -> TextVectors:
    """Adds the vectors of captions' parents to those of captions."""
    if encoder is None:
        problem = "objective.phrases needs an encoder of phrases"
        raise UserError(f"{problem}; name it by --config.model.text.encoder")
    added = {*itertools.chain.from_iterable(parents.values())} - vectors.keys()
    return {**vectors, **text_vectors(encoder, sorted(added))} if added else vectors


def _all_captions(splits: Splits, name: str) -> list[str]:
    """The captions of all images of a dataset; checks that each image has some."""
    captions: set[str] = set()
    for images in _tables(splits):
        if images.captions is None or not all(images.captions):
            advice = "--config.data.captions, or prepare the dataset again"
            raise UserError(f"{name} has images without captions; name a file by {advice}")
        captions |= {*distinct_captions(images)}
    return sorted(captions)


def caption_tokens(
    splits: Splits,
    name: str,
    parents: Mapping[str, Sequence[str]],
    vocabulary: pathlib.Path,
    settings: TextSettings,
) -> TextInputs:
    """Tokens of the captions of all images and of captions' parents, the same in all processes."""
    texts = sorted({*_all_captions(splits, name), *itertools.chain(*parents.values())})

    like = jax.ShapeDtypeStruct((len(texts), settings.context), np.int32)
    rows = processes.arrays_from_first(
        lambda: open_tokenizer(vocabulary, settings).tokens(texts), like
    )
    return dict(zip(texts, rows, strict=True))


def text_inputs(texts: TextInputs, chosen: Sequence[str]) -> Shaped[np.ndarray, "texts size"]:
    """What a tower takes of texts: tokens, int32, or vectors, float32."""
    rows = np.stack([texts[text] for text in chosen])
    return rows if np.issubdtype(rows.dtype, np.integer) else rows.astype(np.float32)


def caption_vectors(splits: Splits, name: str, encoder: str | None) -> TextVectors:
    """Vectors of the captions of all images of a dataset; checks that each image has captions."""
    captions = _all_captions(splits, name)
    if (vectors := splits.test.caption_vectors) is None:
        return text_vectors(str(encoder), captions)
    if encoder is not None:
        few = [*vectors][:4]
        given = np.stack([vectors[text] for text in few])
        made = sentence_encoder(encoder).features(few)
        if made.shape != given.shape or not np.allclose(made, given, 0.01, 0.01 * abs(made).max()):
            problem = f"{encoder} did not make the array text_features"
            raise UserError(f"{problem}; leave out that array or --config.model.text.encoder")
    return vectors


def _tables(splits: Splits) -> list[Dataset]:
    return [x for x in (splits.train, splits.validation, splits.test, splits.gallery) if x]


def caption_facts(
    splits: Splits, encoder: str | None, tokens: TextInputs | None = None
) -> dict[str, str]:
    """Hashes of which image has which captions, of given vectors, and of the encoder of texts.

    In place of the encoder, `tokens` tell what a tower takes.
    """
    # The images' own hashes tell their order; their names change where they are moved.
    captions = [
        images.captions.tolist() for images in _tables(splits) if images.captions is not None
    ]
    facts = {CAPTIONS: fingerprint(captions, splits.test.caption_vectors)}
    if tokens is not None:
        return facts | {TEXT_ENCODER: fingerprint(sorted(tokens), dict(tokens))}
    return facts if encoder is None else facts | {TEXT_ENCODER: encoder_hash(encoder)}


def caption_relevance(images: Dataset) -> tuple[list[Rows], list[Rows]]:
    """Rows of the images of each of `distinct_captions`, and of the captions of each image."""
    row_of = {text: row for row, text in enumerate(distinct_captions(images))}
    assert images.captions is not None
    texts_of = [np.array([row_of[text] for text in own]) for own in images.captions]
    images_of: list[list[int]] = [[] for _ in row_of]
    for image, rows in enumerate(texts_of):
        for row in rows:
            images_of[row].append(image)
    return [*map(np.array, images_of)], texts_of


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
    images_of, texts_of = caption_relevance(images)
    searches = {
        "text_to_image": (texts, points, Relevance(images_of)),
        "image_to_text": (points, texts, Relevance(texts_of)),
    }
    scores: dict[str, Float[np.ndarray, " queries"]] = {}
    for direction, (queries, gallery, relevance) in searches.items():
        names = metric_names(("map", "recall"), [k for k in ks if k <= len(gallery)])
        found = relevance_scores(queries, gallery, relevance, metrics=names, space=space)
        scores |= {f"{direction}/{name}": values for name, values in found.items()}
    return scores
