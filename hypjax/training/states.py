"""A run's state: started, saved and restored."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict
from jaxtyping import PyTree
from ml_collections import ConfigDict

from hypjax import parallel
from hypjax.config.groups import GROUPS
from hypjax.inference.weights import pretrained_encoder
from hypjax.models import model_shapes
from hypjax.monitoring.stopwatch import Stopwatch
from hypjax.objectives import Spec
from hypjax.parallel import processes
from hypjax.runs.shared_checkpoints import SharedCheckpoints
from hypjax.system import console
from hypjax.training import optim
from hypjax.training.learner import Learner
from hypjax.training.setup import Setup, describe
from hypjax.training.step import TrainState, create_state
from hypjax.types import Recalls


class Measured(NamedTuple):
    """Scores measured so far; saved with each state.

    Attributes:
        untrained: Scores on the test classes and the validation classes, before the first step.
        validation: Latest scores on the validation classes, or None before the first.
    """

    untrained: dict[str, Recalls]
    validation: Recalls | None = None

    def selecting(self, name: str) -> float | None:
        """Validation score that selects the best checkpoint: the head's score of this name."""
        return None if self.validation is None else self.validation["head"][name]


def begin(
    config: ConfigDict,
    setup: Setup,
    checkpoints: SharedCheckpoints,
    encoder: PyTree | None,
) -> tuple[TrainState, Measured | None]:
    """Restores the run's latest state and scores, or creates the first state.

    Args:
        config: The run's configuration.
        setup: The run.
        checkpoints: The run's checkpoints.
        encoder: Pretrained parameters of the encoder, if they are read already.

    Returns:
        The state, and the scores measured so far; None before the first step.
    """
    learner = setup.learner
    state = random_state(learner, setup.spec)
    describe(setup, parameters=sum(x.size for x in jax.tree.leaves(state.params)))
    restored = restore(checkpoints, state)
    if restored is not None:
        console.say(f"continuing after step {int(restored[0].step)}")
        return restored
    warn_of_frozen(state, learner.frozen, pretrained=config.model.weights is not None)
    return with_encoder(state, encoder or starting_encoder(config, learner)), None


def score_untrained(setup: Setup, state: TrainState, stopwatch: Stopwatch) -> Measured:
    """Scores the first state, and counts that as evaluation."""
    with stopwatch.part("evaluation"):
        scores = setup.evaluator.scores_of_splits(state.params["model"], setup.splits)
    return Measured(untrained=scores)


def random_state(learner: Learner, spec: Spec) -> TrainState:
    """The state before the first step, of random parameters, on the learner's devices."""
    # One program: compiling one for each operation would take longer.
    state = jax.jit(lambda: create_state(learner, spec))()
    state = processes.arrays_from_first(lambda: state, state)
    return parallel.place(state, parallel.parameter_shardings(learner.mesh, state))


def starting_encoder(config: ConfigDict, learner: Learner) -> PyTree | None:
    """The encoder's parameters that `model.weights` names, read by the first process.

    Returns:
        The parameters, in all processes; None if the encoder starts at random.

    Raises:
        UserError: There are no such weights, or they do not fit the encoder.
    """

    def read() -> PyTree | None:
        if config.model.weights is None:
            return None
        encoder = pretrained_encoder(config, learner.model.encoder)
        console.say(f"the encoder starts from {config.model.weights}")
        return encoder

    shapes = model_shapes(learner.model, learner.view)
    return processes.arrays_from_first(read, shapes["encoder"])


def with_encoder(state: TrainState, encoder: PyTree | None) -> TrainState:
    """Replaces the encoder's parameters, unless there are none to replace them with."""
    if encoder is None:
        return state
    random = state.params["model"]["encoder"]
    encoder = jax.tree.map(lambda x, old: parallel.place(x, old.sharding), encoder, random)
    model = {**state.params["model"], "encoder": encoder}
    return state._replace(params={**state.params, "model": model})


def warn_of_frozen(state: TrainState, frozen: tuple[str, ...], pretrained: bool) -> None:
    """Warns if freezing a group has no effect, or freezes random parameters.

    Args:
        state: The state before the first step.
        frozen: Names of the frozen groups.
        pretrained: Whether the encoder starts from pretrained weights.
    """
    for group in frozen:
        _, parameters = optim.split_frozen(state.params, (group,))
        prefix = GROUPS[group]
        if not any(path[: len(prefix)] == prefix for path in flatten_dict(parameters)):
            console.warn(f"optim.frozen names {group}, but this model has no such parameters")
        elif not pretrained:
            console.warn(f"{group} stays random: it is frozen, and model.weights is None")


def save(
    checkpoints: SharedCheckpoints,
    state: TrainState,
    measured: Measured,
    score: float | None = None,
) -> None:
    """Saves a state unless it is saved already, the model apart from what only training needs.

    Args:
        checkpoints: The run's checkpoints.
        state: The state.
        measured: Scores to save with it.
        score: Validation score that selects the best checkpoint, if it was measured at this step.
    """
    step = int(state.step)
    if step not in checkpoints.steps:
        record = measured._asdict()
        checkpoints.save(step, record=record, score=score, **_trees(state))


def restore(checkpoints: SharedCheckpoints, like: TrainState) -> tuple[TrainState, Measured] | None:
    """Restores the latest undamaged state; None if there is none.

    Args:
        checkpoints: The run's checkpoints.
        like: A state with the shapes and shardings to restore to.
    """
    restored = checkpoints.restore_latest(**_trees(like))
    if restored is None:
        return None
    checkpoints.restore_best(model=like.params["model"])  # Reports damage now, not at the end.
    model, (objective, opt_state, objective_state, skipped) = restored.trees
    step = parallel.place(jnp.int32(restored.step), like.step.sharding)
    params = {"model": model, "objective": objective}
    state = TrainState(step, params, opt_state, objective_state, skipped)
    return state, Measured(**restored.record)


def _trees(state: TrainState) -> dict[str, PyTree]:
    training = (
        state.params["objective"],
        state.opt_state,
        state.objective_state,
        state.skipped,
    )
    return {"model": state.params["model"], "training": training}
