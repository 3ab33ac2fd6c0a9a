"""Evaluation: embeds images under the test view and scores both embeddings by Recall@K."""

import contextlib
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree, UInt8
from ml_collections import ConfigDict

from hypjax import memory, reporting
from hypjax.data import device
from hypjax.data.dataset import Dataset, Splits, open_splits
from hypjax.data.pipeline import evaluation_batches
from hypjax.errors import UserError
from hypjax.geometry import Space, Sphere
from hypjax.interfaces import Outputs
from hypjax.models import Embedder, create_embedder
from hypjax.objectives import create_objective
from hypjax.retrieval import mean_score, query_scores
from hypjax.workdir import Workdir


class Evaluator:
    """Scores a model on datasets; compiled once, whatever their sizes.

    The head is compared in the objective's space, the encoder by cosine (Hyp-ViT, Section 4.2).
    """

    def __init__(self, config: ConfigDict, model: Embedder, score_space: Space) -> None:
        """Prepares the jitted embedding; it compiles at its first use."""
        self._config = config
        self._spaces = {"head": score_space, "encoder": Sphere()}
        self._embed = jax.jit(embed_function(config, model, self._spaces))

    def recalls(
        self, params: PyTree, dataset: Dataset, gallery: Dataset | None = None
    ) -> dict[str, dict[str, float]]:
        """Recall@K of both embeddings, and what else `eval.metrics` names.

        Args:
            params: Of the model.
            dataset: Images that search, with their labels.
            gallery: Images to find; None: each searches all others.

        Returns:
            {"head": {"recall@1": ...}, "encoder": {...}}.

        Raises:
            UserError: An image cannot be read, or the device's memory does not suffice.
        """
        with memory.explained("run.eval_batch_size"):
            points = self.points(params, dataset)
            found = self.points(params, gallery) if gallery else dict.fromkeys(points)
        labels = gallery.labels if gallery else None
        scores = {
            part: query_scores(
                points[part],
                dataset.labels,
                found[part],
                labels,
                metrics=self._metrics(),
                space=space,
            )
            for part, space in self._spaces.items()
        }
        return {
            part: {name: mean_score(values) for name, values in of_part.items()}
            for part, of_part in scores.items()
        }

    def _metrics(self) -> list[str]:
        """Names of the scores: recall and precision at each K, the others as they are."""
        names = []
        for name in self._config.eval.metrics:
            each = name in ("recall", "precision")
            names += [f"{name}@{k}" for k in self._config.eval.ks] if each else [name]
        return names

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
        with contextlib.closing(batches):
            embedded = [self._embed(params, images) for images in batches]
        return {
            part: np.concatenate([np.asarray(points[part]) for points in embedded])[: len(dataset)]
            for part in self._spaces
        }


def check_depth(config: ConfigDict, splits: Splits) -> None:
    """Refuses a K that is larger than what there is to find, where precision is asked for.

    Raises:
        UserError: It is.
    """
    if "precision" not in config.eval.metrics:
        return
    items = [len(splits.gallery) if splits.gallery else len(splits.test) - 1]
    items += [len(splits.validation) - 1] if splits.validation else []
    if max(config.eval.ks) > min(items):
        raise UserError(
            f"config.eval.ks holds {max(config.eval.ks)}, but for precision there are only "
            f"{min(items)} images to find"
        )


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
    """Evaluates a run's last checkpoint and its best one on the test classes; prints the table.

    Fields that shape neither images nor model, such as `eval.ks`, may differ from the run's. Only
    the last model of a finished run is called final.

    Args:
        config: The run's configuration.
        workdir: Its folder.

    Returns:
        {"final": {"head": {"recall@1": ...}, "encoder": {...}}, "best": ...}, with "step 1000" in
        the place of "final" where training was interrupted there, and "best" where a validation
        on held-out classes chose one.

    Raises:
        UserError: The folder holds no checkpoint, or one of another run, or the images have
            changed, so that others may be among the test classes than were.
    """
    model, states = restore_models(config, workdir)
    evaluator = Evaluator(config, model, create_objective(config).score_space)
    splits = open_splits(config)
    check_depth(config, splits)
    Workdir(pathlib.Path(workdir), config, compared=()).require({"images": splits.fingerprint})
    results = {
        name: evaluator.recalls(params, splits.test, splits.gallery)
        for name, params in states.items()
    }
    print(f"Recall on the test classes, by the models in {workdir}:")
    print(reporting.format_results(results))
    return results


def restore_models(
    config: ConfigDict, workdir: str | pathlib.Path
) -> tuple[Embedder, dict[str, PyTree]]:
    """The model of a run, and its parameters by the names that `evaluate` gives them.

    Raises:
        UserError: The folder holds no checkpoint, or one of another run.
    """
    run = Workdir(pathlib.Path(workdir), config, compared=("data.", "model.", "objective."))
    model = create_embedder(config)
    shapes = model_shapes(config, model)
    latest = None
    if run.has_checkpoint:
        with contextlib.closing(run.checkpoints(read_only=True)) as checkpoints:
            latest = checkpoints.restore_latest(model=shapes)
            best = checkpoints.restore_best(model=shapes)
    if latest is None:
        raise UserError(
            f"{run.path} holds no checkpoint; train first, or name a run's folder with --workdir"
        )
    finished = run.results is not None and latest.step == run.total_steps
    states = {"final" if finished else f"step {latest.step}": latest.trees[0]}
    return model, states if best is None else states | {"best": best.trees[0]}


def example_images(config: ConfigDict) -> Float[Array, "1 side side channels"]:
    """One black image, to initialise a model with."""
    side = config.data.image_size
    return jnp.zeros((1, side, side, config.data.channels))


def model_shapes(config: ConfigDict, model: Embedder) -> PyTree:
    """Shapes and dtypes of a model's parameters, without computing any."""
    return jax.eval_shape(model.init, jax.random.key(0), example_images(config))["params"]
