"""Evaluation: embeds images under the test view and scores both embeddings by Recall@K."""

import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree, UInt8
from ml_collections import ConfigDict

from hypjax import reporting
from hypjax.checkpoints import Workdir
from hypjax.data import device
from hypjax.data.dataset import Dataset, open_splits
from hypjax.data.pipeline import evaluation_batches
from hypjax.errors import UserError
from hypjax.geometry import Space, Sphere
from hypjax.interfaces import Outputs
from hypjax.models import Embedder, create_embedder
from hypjax.objectives import create_objective
from hypjax.retrieval import recall_at_k


class Evaluator:
    """Scores a model on datasets; compiled once, whatever their sizes.

    The head is compared in the objective's space, the encoder by cosine (Hyp-ViT, Section 4.2).
    """

    def __init__(self, config: ConfigDict, model: Embedder, score_space: Space) -> None:
        """Prepares the jitted embedding; it compiles at its first use."""
        self._config = config
        self._spaces = {"head": score_space, "encoder": Sphere()}
        self._embed = jax.jit(embed_function(config, model, self._spaces))

    def recalls(self, params: PyTree, dataset: Dataset) -> dict[str, dict[str, float]]:
        """Recall@K of both embeddings, each image searching all others.

        Args:
            params: Of the model.
            dataset: Images with their labels.

        Returns:
            {"head": {"recall@1": ...}, "encoder": {...}}.
        """
        points = self.points(params, dataset)
        return {
            part: {
                f"recall@{k}": recall
                for k, recall in recall_at_k(
                    points[part], dataset.labels, ks=self._config.eval.ks, space=space
                ).items()
            }
            for part, space in self._spaces.items()
        }

    def points(self, params: PyTree, dataset: Dataset) -> dict[str, np.ndarray]:
        """Embeds all images of a dataset, each part in its space."""
        batches = evaluation_batches(
            dataset,
            shorter_side=self._config.data.resize,
            side=self._config.data.image_size,
            channels=self._config.data.channels,
            batch_size=self._config.run.eval_batch_size,
            workers=self._config.run.workers,
        )
        embedded = [self._embed(params, images) for images in batches]
        return {
            part: np.concatenate([np.asarray(points[part]) for points in embedded])[: len(dataset)]
            for part in self._spaces
        }


def embed_function(
    config: ConfigDict, model: Embedder, spaces: dict[str, Space]
) -> Callable[[PyTree, UInt8[Array, "batch side side channels"]], dict[str, Array]]:
    """The function from parameters and pixels to points of each space, to be jitted."""

    def embed(params: PyTree, images: Array) -> dict[str, Array]:
        images = device.normalize(images, config.data.mean, config.data.std)
        outputs: Outputs = model.apply({"params": params}, images)
        features = {"head": outputs.projected, "encoder": outputs.pooled}
        return {part: space.embed(features[part]) for part, space in spaces.items()}

    return embed


def evaluate(config: ConfigDict, workdir: str | pathlib.Path) -> dict[str, Any]:
    """Evaluates a run's last checkpoint on the test classes and prints the table.

    Fields that shape neither images nor model, such as `eval.ks`, may differ from the run's. Only
    the model of a finished run is called final.

    Args:
        config: The run's configuration.
        workdir: Its folder.

    Returns:
        {"final": {"head": {"recall@1": ...}, "encoder": {...}}}, with "step 1000" in the place of
        "final" where training was interrupted there.

    Raises:
        UserError: The folder holds no checkpoint, or one of another run.
    """
    model, params, name = restore_model(config, workdir)
    evaluator = Evaluator(config, model, create_objective(config).score_space)
    results = {name: evaluator.recalls(params, open_splits(config).test)}
    print(f"Recall on the test classes, by the model in {workdir}:")
    print(reporting.format_results(results))
    return results


def restore_model(config: ConfigDict, workdir: str | pathlib.Path) -> tuple[Embedder, PyTree, str]:
    """The model of a run's last checkpoint, its parameters, and its name: final, or a step's.

    Raises:
        UserError: The folder holds no checkpoint, or one of another run.
    """
    run = Workdir(pathlib.Path(workdir), config, compared=("data.", "model.", "objective."))
    if not run.has_checkpoint:
        raise UserError(
            f"{run.path} holds no checkpoint; train first, or name a run's folder with --workdir"
        )
    model, checkpoints = create_embedder(config), run.checkpoints()
    (params,) = checkpoints.restore(model=_model_shapes(config, model))
    name = f"step {checkpoints.latest_step}" if run.results is None else "final"
    checkpoints.close()
    return model, params, name


def example_images(config: ConfigDict) -> Float[Array, "1 side side channels"]:
    """One black image, to initialise a model with."""
    side = config.data.image_size
    return jnp.zeros((1, side, side, config.data.channels))


def _model_shapes(config: ConfigDict, model: Embedder) -> PyTree:
    """Shapes and dtypes of a model's parameters, without computing any."""
    return jax.eval_shape(model.init, jax.random.key(0), example_images(config))["params"]
