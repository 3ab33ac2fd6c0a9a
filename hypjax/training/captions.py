"""Batches with captions: the vector of one caption of each image, and what texts describe what."""

from collections.abc import Generator, Iterable

import numpy as np

from hypjax.data.dataset import Dataset
from hypjax.data.plans import CAPTIONS, Plans, padded_rows
from hypjax.data.sentences import TextVectors
from hypjax.types import POSITIVES, TEXTS, Batch


def with_captions(
    batches: Iterable[Batch],
    steps: Iterable[int],
    plans: Plans,
    images: Dataset,
    texts: TextVectors,
    rows: range,
) -> Generator[Batch, None, None]:
    """Adds captions to a run's batches; rows that pad a batch are zeros.

    A step's captions, one drawn for each image, are a function of the run's seed and the step.
    """
    assert images.captions is not None
    for step, batch in zip(steps, batches, strict=True):
        captions = images.captions[batch.ids]
        draws = plans.rng(CAPTIONS, step).random(len(captions))
        chosen = [x[int(draw * len(x))] for x, draw in zip(captions, draws, strict=True)]
        number_of = {text: number for number, text in enumerate(dict.fromkeys(chosen))}
        describes = np.zeros((len(captions), len(number_of)), bool)
        for row, own in enumerate(captions):
            describes[row, [number_of[text] for text in own if text in number_of]] = True
        vectors = np.stack([texts[text] for text in chosen]).astype(np.float32)
        positives = describes[:, [number_of[text] for text in chosen]]
        inputs = {TEXTS: padded_rows(vectors, rows, 0)}
        inputs[POSITIVES] = padded_rows(positives, rows, False)
        yield batch._replace(inputs={**batch.inputs, **inputs})
