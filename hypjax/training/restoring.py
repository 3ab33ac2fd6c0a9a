"""The model of a trained run together with the parameters of its objective."""

import contextlib
from typing import NamedTuple

import jax
from jaxtyping import PyTree
from ml_collections import ConfigDict

from hypjax.errors import UserError, redacted
from hypjax.inference.weights import restore_best
from hypjax.models import Embedder, create_embedder
from hypjax.runs.cloud_read import reading
from hypjax.runs.workdir import Workdir
from hypjax.training import setup, states
from hypjax.training.step import create_state


class Trained(NamedTuple):
    """A trained run: its best state on the validation classes if there are any, else its last.

    Attributes:
        model: Encoder and head, as they are evaluated.
        params: Parameters of the model.
        objective: Parameters of the objective; None if they were not asked for.
    """

    model: Embedder
    params: PyTree
    objective: PyTree | None


def restore_trained(
    workdir: str, config: ConfigDict, fingerprint: str, with_objective: bool
) -> Trained:
    """Restores a trained run.

    Args:
        workdir: The run's folder or URL.
        config: Its configuration.
        fingerprint: Hash of the dataset's images.
        with_objective: Whether to restore the parameters of the objective, too. This reads the
            state of the optimiser as well, since one checksum protects both.

    Raises:
        UserError: The folder holds no trained model, or the images have changed.
    """
    with reading(workdir, training=with_objective) as folder:
        run = Workdir(folder, config, compared=())
        run.require({"images": fingerprint})
        if not with_objective:
            return Trained(*restore_best(folder), None)
        if not run.has_checkpoint:
            raise UserError(f"{redacted(workdir)} holds no checkpoint; train first")
        built = setup.build(config)
        like = states.trees(jax.eval_shape(lambda: create_state(built.learner, built.spec)))
        with contextlib.closing(run.checkpoints(read_only=True)) as checkpoints:
            found = checkpoints.restore_best(**like) or checkpoints.restore_latest(**like)
    params, (objective, *_) = found.trees
    return Trained(create_embedder(config, evaluating=True), params, objective)


def untrained_parameters(config: ConfigDict) -> PyTree:
    """The model's parameters before the first step of a run: random or pretrained ones.

    Args:
        config: The run's configuration.

    Raises:
        UserError: The images or the pretrained weights cannot be read.
    """
    config = config.copy_and_resolve_references()
    config.run.cache = "none"  # No step is made; the device cache might not fit this device.
    built = setup.build(config)
    state = states.random_state(built.learner, built.spec)
    pretrained = states.starting_parameters(config, built.learner)
    return states.with_pretrained(built.learner, state, pretrained).params["model"]
