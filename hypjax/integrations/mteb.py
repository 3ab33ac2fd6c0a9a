"""A trained model as an encoder for mteb, whose benchmark MIEB has tasks of image retrieval."""

import functools
import os
import pathlib
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
from hypjax.system import hub

_BLOCK = 1024  # Rows whose distances are computed in float64 at once.
_Points = Float[np.ndarray, "n d"]


class MtebEncoder:
    """A trained model that mteb evaluates by the distance of the model's space.

    `mteb.evaluate(MtebEncoder("runs/a"), tasks)` scores the model on tasks of images. Tasks that
    train classifiers or find clusters treat points as coordinates of a flat space.
    """

    def __init__(self, model_name: str | os.PathLike[str]) -> None:
        self._model = load(model_name)
        self.space = self._model.space

    @functools.cached_property
    def mteb_model_meta(self) -> ModelMeta:
        """The model's record in mteb: its name, and its fingerprint as revision."""
        name, _ = hub.split(self._model.source)
        if not hub.is_repository(self._model.source):  # mteb needs OWNER/NAME.
            name = f"hypjax/{pathlib.Path(self._model.source).name}"
        dataset = PREPARED.get(self._model.method.fields["data.name"])
        known = {dataset.mteb} if dataset and dataset.mteb else None
        facts = {"name": name, "revision": self._model.fingerprint, "training_datasets": known}
        modalities = ["image", "text"] if self._model.takes_texts else ["image"]
        return ModelMeta.create_empty(facts | {"framework": ["JAX"], "modalities": modalities})

    def encode(self, inputs: Iterable[Mapping[str, Any]], **options: Any) -> _Points:
        """Embeds the images of mteb's batches as points of the model's space, float32."""
        del options  # The task, its split, and settings of other models.
        points = []
        for batch in inputs:
            if "image" in batch:
                points.append(self._model.embed(batch["image"]))
            elif "text" in batch and self._model.takes_texts:
                points.append(self._model.embed_texts(list(batch["text"])).vectors)
            else:
                raise UserError(f"this model embeds images, but the task has {', '.join(batch)}")
        return np.concatenate(points)

    def similarity(self, embeddings1: Any, embeddings2: Any) -> Float[np.ndarray, "n m"]:
        """Negative distances of all pairs of points [n, d] and [m, d], float32."""
        rows, columns = _as_float64(embeddings1), _as_float64(embeddings2)
        with jax.enable_x64(True):  # In float32, a matrix product loses digits of close points.
            distances = [
                np.float32(distance_matrix(self.space, rows[block], columns))
                for block in blocks(len(rows), _BLOCK)
            ]
        return -np.concatenate(distances)

    def similarity_pairwise(self, embeddings1: Any, embeddings2: Any) -> Float[np.ndarray, " n"]:
        """Negative distances of corresponding points [n, d], float32."""
        with jax.enable_x64(True):
            distances = self.space.distance(_as_float64(embeddings1), _as_float64(embeddings2))
            return -np.asarray(distances, np.float32)


def _as_float64(embeddings: Any) -> _Points:
    """Embeddings in float64. mteb may pass PyTorch tensors, and single points."""
    return np.atleast_2d(np.asarray(embeddings, np.float64))
