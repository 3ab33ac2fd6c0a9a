"""Batches with captions: one caption of each image, a phrase of it, and which texts describe it."""

from collections.abc import Generator, Iterable, Mapping, Sequence

import numpy as np

from hypjax.data.dataset import Dataset
from hypjax.data.plans import CAPTIONS, Plans, padded_rows
from hypjax.data.sentences import TextInputs
from hypjax.experiment.captions import text_inputs
from hypjax.types import POSITIVES, TEXTS, Batch


def with_captions(
    batches: Iterable[Batch],
    steps: Iterable[int],
    plans: Plans,
    images: Dataset,
    texts: TextInputs,
    rows: range,
    parents: Mapping[str, Sequence[str]] | None = None,
) -> Generator[Batch, None, None]:
    """Adds captions to a run's batches; rows that pad a batch are zeros.

    A step's captions, one drawn for each image, are a function of the run's seed and the step. With
    `parents`, the more general texts of each caption, a row has two inputs: the caption's, and that
    of one drawn parent, or again the caption's if it has none.
    """
    assert images.captions is not None
    for step, batch in zip(steps, batches, strict=True):
        captions, rng = images.captions[batch.ids], plans.rng(CAPTIONS, step)
        draws = rng.random(len(captions))
        chosen = [x[int(draw * len(x))] for x, draw in zip(captions, draws, strict=True)]
        number_of = {text: number for number, text in enumerate(dict.fromkeys(chosen))}
        describes = np.zeros((len(captions), len(number_of)), bool)
        for row, own in enumerate(captions):
            describes[row, [number_of[text] for text in own if text in number_of]] = True
        inputs_of_texts = text_inputs(texts, chosen)
        if parents is not None:
            above = [parents[text] or (text,) for text in chosen]
            draws = rng.random(len(above))
            drawn = [x[int(draw * len(x))] for x, draw in zip(above, draws, strict=True)]
            of_parents = text_inputs(texts, drawn)
            inputs_of_texts = np.stack([inputs_of_texts, of_parents], axis=1)
        positives = describes[:, [number_of[text] for text in chosen]]
        inputs = {TEXTS: padded_rows(inputs_of_texts, rows, 0)}
        inputs[POSITIVES] = padded_rows(positives, rows, False)
        yield batch._replace(inputs={**batch.inputs, **inputs})
