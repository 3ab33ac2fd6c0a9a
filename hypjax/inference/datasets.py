"""Embedding all images of a dataset under the test view."""

import contextlib
from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, PyTree, UInt8
from ml_collections import ConfigDict

from hypjax import parallel
from hypjax.data.dataset import Dataset
from hypjax.data.pipeline import evaluation_batches
from hypjax.types import View, Workers


class EvaluationInput(NamedTuple):
    """How images reach a model that is evaluated.

    Attributes:
        view: The test view.
        workers: What decodes images.
        batch_size: Images embedded at once.
        mesh: Devices that share each batch.
    """

    view: View
    workers: Workers
    batch_size: int
    mesh: Mesh


def evaluation_input(config: ConfigDict, mesh: Mesh | None = None) -> EvaluationInput:
    """The input that a configuration describes.

    Args:
        config: The run's configuration.
        mesh: Devices to use; by default those that `run.mesh` names.
    """
    run = config.run
    return EvaluationInput(
        view=View.of(config.data),
        workers=Workers.of(run),
        batch_size=run.eval_batch_size,
        mesh=mesh or parallel.create_mesh(run.mesh),
    )


def embed_dataset(
    embed: Callable[[UInt8[Array, "batch side side channels"]], PyTree],
    dataset: Dataset,
    source: EvaluationInput,
) -> PyTree:
    """Embeds all images of a dataset under the test view.

    Args:
        embed: From the pixels of a batch, sharded over the devices and always of one size, to
            arrays that are replicated.
        dataset: The images.
        source: View, workers, batch size and devices.

    Returns:
        NumPy arrays with one row per image.
    """
    mesh = source.mesh
    size = parallel.slices(source.batch_size, mesh).rows
    rows = parallel.local_rows(mesh, size)
    batches = evaluation_batches(dataset, source.view, size, source.workers, rows)
    with contextlib.closing(batches):
        embedded = [parallel.gather(embed(parallel.shard(mesh, images))) for images in batches]
    return jax.tree.map(
        lambda *parts: np.concatenate([np.asarray(part) for part in parts])[: len(dataset)],
        *embedded,
    )
