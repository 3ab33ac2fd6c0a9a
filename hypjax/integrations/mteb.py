"""A trained model as an encoder of mteb, whose benchmark MIEB has tasks of image retrieval."""

import functools
import os
import pathlib
import re
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np
from jaxtyping import Float
from mteb.models.model_meta import ModelMeta

from hypjax.catalogue import PREPARED
from hypjax.errors import UserError
from hypjax.geometry.spaces import distance_matrix
from hypjax.inference.model import load
from hypjax.retrieval.inputs import blocks

_BLOCK = 1024  # Rows whose distances are computed in float64 at once.


class MtebEncoder:
    """A trained model, which mteb evaluates by the distance of the model's own space.

    `mteb.evaluate(MtebEncoder("runs/a"), tasks)` scores it on tasks of images. Tasks of classifiers
    and clusters treat points as coordinates of a flat space.
    """

    def __init__(self, model_name: str | os.PathLike[str]) -> None:
        self._model = load(model_name)
        self.space = self._model.space

    @functools.cached_property
    def mteb_model_meta(self) -> ModelMeta:
        """The model's record in mteb: its name, and its fingerprint as revision."""
        # OWNER/NAME, as mteb wants it; runs of this machine have the owner hypjax.
        hub = re.fullmatch(r"hf://([^/]+/[^/@]+).*", self._model.source)
        trained_on = getattr(PREPARED.get(self._model.config.data.name), "mteb", "")
        name = hub[1] if hub else f"hypjax/{pathlib.Path(self._model.source).name}"
        facts = {"name": name, "revision": self._model.fingerprint, "framework": ["JAX"]}
        trained = {"training_datasets": {trained_on} if trained_on else None}
        return ModelMeta.create_empty({**facts, "modalities": ["image"], **trained})

    def encode(
        self, inputs: Iterable[Mapping[str, Any]], **options: Any
    ) -> Float[np.ndarray, "images d"]:
        """Points of the model's space for the images of mteb's batches, float32."""
        del options  # The task, its split and others.
        rows = []
        for batch in inputs:
            if "image" not in batch:
                raise UserError(f"this model embeds images, but the task has {', '.join(batch)}")
            rows.append(self._model.embed(batch["image"]))
        return np.concatenate(rows)

    def similarity(
        self, embeddings1: Float[np.ndarray, "n d"], embeddings2: Float[np.ndarray, "m d"]
    ) -> Float[np.ndarray, "n m"]:
        """Negative distances of all pairs in the model's space, float32."""
        rows, columns = _rows(embeddings1), _rows(embeddings2)
        with jax.enable_x64(True):  # Or one matrix product would lose the digits of close points.
            slices = blocks(len(rows), _BLOCK)
            tiles = (distance_matrix(self.space, rows[x], columns) for x in slices)
            return -np.concatenate(list(map(np.float32, tiles)))

    def similarity_pairwise(
        self, embeddings1: Float[np.ndarray, "n d"], embeddings2: Float[np.ndarray, "n d"]
    ) -> Float[np.ndarray, " n"]:
        """Negative distances of rows in the model's space, float32."""
        rows = _rows(embeddings1), _rows(embeddings2)
        with jax.enable_x64(True):
            return -np.asarray(self.space.distance(*rows), np.float32)


def _rows(embeddings: Any) -> Float[np.ndarray, "n d"]:
    """Embeddings in float64; mteb may hand over tensors of PyTorch, and single points."""
    return np.atleast_2d(np.asarray(embeddings, np.float64))
