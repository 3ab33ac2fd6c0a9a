"""What happens to embeddings between the model and their scores, as `config.eval` says."""

import hashlib
import json
import pathlib
from collections.abc import Mapping
from typing import NamedTuple, Self

import jax
import numpy as np
from jaxtyping import Float, PyTree
from ml_collections import ConfigDict

from hypjax.config.own import own_name
from hypjax.errors import UserError
from hypjax.geometry import Space
from hypjax.inference.embedding import part_of, scored_spaces
from hypjax.models.own import ENCODERS
from hypjax.retrieval.embeddings import describe_space
from hypjax.retrieval.projection import Projection, fit
from hypjax.retrieval.refinement import Refinement
from hypjax.retrieval.reranking import Reranking
from hypjax.runs.files import PROJECTIONS

# By the names of `hypjax.inference.embedding`; parts without PCA have no projection.
Points = Mapping[str, Float[np.ndarray, "n d"]]
Projections = Mapping[str, Projection]


class Processing(NamedTuple):
    """The fields of `config.eval` that change embeddings or results; `pca` names dimensions."""

    pca: Mapping[str, int]
    whiten: bool
    refinement: Refinement

    @classmethod
    def of(cls, config: ConfigDict) -> Self:
        """The processing that a configuration describes."""
        fields = config.eval
        pca = {part: dim for part, dim in fields.pca.items() if dim is not None}
        reranking = Reranking() if fields.rerank else None
        refinement = Refinement(fields.expansion, fields.expansion_alpha, reranking)
        return cls(pca, fields.whiten, refinement)

    def fit(self, training: Points, spaces: Mapping[str, Space]) -> Projections:
        """Fits the projections on the training images' embeddings, where there is PCA."""
        projections = {}
        for name, points in training.items():
            part = part_of(name)
            if part not in self.pca:
                continue
            dim = self.pca[part]
            try:
                projections[name] = fit(points, space=spaces[name], dim=dim, whiten=self.whiten)
            except UserError as error:
                raise UserError(f"config.eval.pca.{part} is {dim}: {error}") from error
        return projections


def model_fingerprint(config: ConfigDict, part: str, space: Space, params: PyTree) -> str:
    """Hash of everything that a model's embeddings depend on besides the images."""
    names = ("channels", "image_size", "resize", "mean", "std", "test_view")
    view = [config.data[name] for name in names]
    scales = [float(scale) for scale in config.eval.scales]
    model = config.model
    facts = [part, describe_space(space), view, scales, model.eval_pooling, model.head]
    # What parameters do not show of a module of the user's: an activation, or a stride.
    module = ENCODERS.get(model.architecture)
    facts += [] if module is None else [own_name(module)]
    digest = hashlib.sha256(json.dumps(facts).encode())
    for leaf in jax.tree.leaves(params):
        digest.update(np.ascontiguousarray(leaf))
    return digest.hexdigest()[:32]


def save_projections(
    folder: pathlib.Path, config: ConfigDict, params: PyTree, projections: Projections
) -> None:
    """Saves a model's projections in the run's folder, under the model's fingerprints."""
    for name, projection in projections.items():
        part = part_of(name)
        path = _path(folder, part, model_fingerprint(config, part, projection.space, params))
        path.parent.mkdir(exist_ok=True)
        projection.save(path)


def saved_projection(
    folder: pathlib.Path, config: ConfigDict, part: str, space: Space, embeddings: str
) -> Projection | None:
    """Reads the projection of a model's embeddings; None if its run does not ask for one."""
    if part not in Processing.of(config).pca:
        return None
    path = _path(folder, part, embeddings)
    if not path.is_file():
        raise UserError(
            f"{folder} holds no projection of its {part}'s embeddings, which training fits after "
            "its last step; finish the run, or copy its projections, too"
        )
    return Projection.load(path, space)


def copy_projections(
    source: pathlib.Path, target: pathlib.Path, config: ConfigDict, params: PyTree
) -> None:
    """Copies the projections of a model's parts; those of a run that is not finished are absent."""
    for part in Processing.of(config).pca:
        space = scored_spaces(config, params)[part]
        fingerprint = model_fingerprint(config, part, space, params)
        if _path(source, part, fingerprint).exists():
            found = saved_projection(source, config, part, space, fingerprint)
            save_projections(target, config, params, {part: found})


def _path(folder: pathlib.Path, part: str, embeddings: str) -> pathlib.Path:
    return folder / PROJECTIONS / f"{part}-{embeddings}.npz"
