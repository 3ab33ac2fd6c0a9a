"""Evaluation: embeds images under the test view and scores both embeddings by Recall@K."""

import contextlib
import functools
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, PyTree, UInt8
from ml_collections import ConfigDict

from hypjax import parallel
from hypjax.config import validate
from hypjax.data.dataset import Dataset, Splits
from hypjax.data.pipeline import evaluation_batches
from hypjax.data.splits import open_splits
from hypjax.errors import UserError
from hypjax.geometry import Space, Sphere
from hypjax.inference.embedding import embed_function
from hypjax.inference.weights import pretrained_encoder, restore_models
from hypjax.models import create_embedder, model_shapes
from hypjax.models.normalize import normalize
from hypjax.objectives import create_objective
from hypjax.parallel import processes
from hypjax.reports import published
from hypjax.reports.tables import format_results, noted, print_notes
from hypjax.retrieval import mean_score, query_scores
from hypjax.runs.cloud_read import reading
from hypjax.runs.workdir import Workdir, saved_config
from hypjax.system import memory
from hypjax.types import View, Workers


class Evaluator:
    """Scores a model on datasets; compiled once, whatever their sizes.

    The head is compared in the objective's space, the encoder by cosine (Hyp-ViT, Section 4.2).
    """

    def __init__(
        self, config: ConfigDict, score_space: Space | None, mesh: Mesh | None = None
    ) -> None:
        """Prepares the jitted embedding; it compiles at its first use.

        Args:
            config: The run's configuration.
            score_space: Of the head's embedding; None: the encoder's alone is scored.
            mesh: Devices that share the images; None: those that the configuration names.
        """
        self._config = config
        self._mesh = mesh or parallel.create_mesh(config.run.mesh)
        head = {} if score_space is None else {"head": score_space}
        self._spaces = {**head, "encoder": Sphere()}
        model = create_embedder(config, evaluating=True)
        embed = embed_function(config, model, self._spaces)
        self._embed = jax.jit(parallel.map_images(embed, self._mesh))

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
        means = {
            part: {name: mean_score(values) for name, values in of_part.items()}
            for part, of_part in scores.items()
        }
        return processes.from_first(lambda: means)  # So that all decide alike by them.

    def _metrics(self) -> list[str]:
        """Names of the scores: recall and precision at each K, the others as they are."""
        names = []
        for name in self._config.eval.metrics:
            each = name in ("recall", "precision")
            names += [f"{name}@{k}" for k in self._config.eval.ks] if each else [name]
        return names

    def points(self, params: PyTree, dataset: Dataset) -> dict[str, np.ndarray]:
        """Embeds all images of a dataset, each part in its space."""
        params = parallel.place(params, parallel.replicated(self._mesh))
        embed = functools.partial(self._embed, params)
        return embed_dataset(self._config, embed, dataset, self._mesh)


def embed_dataset(
    config: ConfigDict,
    embed: Callable[[UInt8[Array, "b s s c"]], PyTree],
    dataset: Dataset,
    mesh: Mesh,
) -> PyTree:
    """Embeds all images of a dataset under the test view: NumPy arrays, a row an image.

    Args:
        config: The run's configuration.
        embed: From pixels of a batch, always as many and shared out over the devices, to arrays
            that each of them has.
        dataset: The images.
        mesh: The devices.
    """
    size = parallel.slices(config.run.eval_batch_size, mesh).rows
    batches = evaluation_batches(
        dataset,
        View(config.data.image_size, config.data.resize, config.data.channels),
        size,
        Workers(config.run.workers, config.run.input_timeout),
        parallel.local_rows(mesh, size),
    )
    with contextlib.closing(batches):
        embedded = [parallel.gather(embed(parallel.shard(mesh, images))) for images in batches]
    return jax.tree.map(
        lambda *parts: np.concatenate([np.asarray(part) for part in parts])[: len(dataset)],
        *embedded,
    )


def pretrained_features(
    config: ConfigDict,
) -> tuple[Float[np.ndarray, "images dim"], tuple[str, ...]]:
    """Embeddings of the training images by the encoder that `model.weights` names.

    With them, what every result computed from these images has to say. As in Hyp-ViT's Table 1:
    not normalised, under a test view that cuts nothing off the shorter side, whatever
    `data.resize` says.

    Raises:
        UserError: There are no such weights, or the images cannot be read.
    """
    validate(config)
    encoder = create_embedder(config, evaluating=True).encoder
    splits = open_splits(config)
    mesh = parallel.create_mesh(config.run.mesh)
    params = parallel.place(pretrained_encoder(config, encoder), parallel.replicated(mesh))
    config = config.copy_and_resolve_references()
    config.data.resize = config.data.image_size

    def embed(params: PyTree, images: Array) -> Array:
        images = normalize(images, config.data.mean, config.data.std)
        return encoder.apply({"params": params}, images).astype(jnp.float32)

    jitted = functools.partial(jax.jit(parallel.map_images(embed, mesh)), params)
    with memory.explained("run.eval_batch_size"):
        return embed_dataset(config, jitted, splits.train, mesh), splits.notes


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


def evaluate_pretrained(config: ConfigDict) -> dict[str, Any]:
    """Evaluates the encoder that `model.weights` names on the test classes; prints the table.

    Returns:
        {"pretrained": {"encoder": {"recall@1": ...}}}.

    Raises:
        UserError: There are no such weights, or they do not fit; or the images cannot be read.
    """
    validate(config)
    model = create_embedder(config)
    splits = open_splits(config)
    check_depth(config, splits)
    view = View(config.data.image_size, config.data.resize, config.data.channels)
    shapes = model_shapes(model, view)
    params = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    params["encoder"] = processes.arrays_from_first(
        lambda: pretrained_encoder(config, model.encoder), shapes["encoder"]
    )
    evaluator = Evaluator(config, None)
    results = {"pretrained": evaluator.recalls(params, splits.test, splits.gallery)}
    print(f"Recall on the test classes, by {config.model.weights}:")
    print(format_results(results))
    results |= noted(splits.notes)
    print_notes(results)
    published.show(results, config)
    return results


def evaluate(config: ConfigDict, workdir: str | pathlib.Path) -> dict[str, Any]:
    """Evaluates a run's last checkpoint and its best one on the test classes; prints the table.

    Fields that shape neither images nor model, such as `eval.ks`, may differ from the run's. Only
    the last model of a finished run is called final.

    Args:
        config: The run's configuration.
        workdir: Its folder, possibly a URL of cloud storage.

    Returns:
        {"final": {"head": {"recall@1": ...}, "encoder": {...}}, "best": ...}, with "step 1000" in
        the place of "final" where training was interrupted there, and "best" where a validation
        on held-out classes chose one.

    Raises:
        UserError: The folder holds no checkpoint, or one of another run, or the images have
            changed, so that others may be among the test classes than were.
    """
    states, run, trained = {}, None, config
    if processes.is_first():
        with reading(workdir) as folder:
            _, states = restore_models(config, folder)
            run, trained = Workdir(folder, config, compared=()), saved_config(folder)
    splits = open_splits(config)
    check_depth(config, splits)
    processes.require_same({"images": splits.fingerprint})
    if run is not None:
        run.require({"images": splits.fingerprint})
    states = from_first(config, states)
    evaluator = Evaluator(config, create_objective(config).score_space)
    results = {
        name: evaluator.recalls(params, splits.test, splits.gallery)
        for name, params in states.items()
    }
    print(f"Recall on the test classes, by the models in {workdir}:")
    print(format_results(results))
    results |= noted(splits.notes)
    print_notes(results)
    published.show(results, trained)
    return results


def from_first(config: ConfigDict, states: dict[str, PyTree]) -> dict[str, PyTree]:
    """Models' parameters by their names, as the first process has them, in all of them."""
    view = View(config.data.image_size, config.data.resize, config.data.channels)
    shapes = model_shapes(create_embedder(config, evaluating=True), view)
    return {
        name: processes.arrays_from_first(lambda name=name: states[name], shapes)
        for name in processes.from_first(lambda: list(states))
    }
