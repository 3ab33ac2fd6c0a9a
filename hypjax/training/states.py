"""A run's state: started, saved and restored."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict
from jaxtyping import PyTree
from ml_collections import ConfigDict

from hypjax import parallel
from hypjax.config.choices import parameter_path
from hypjax.data.parts import Task
from hypjax.inference.weights import pretrained_parameters
from hypjax.models import model_shapes
from hypjax.monitoring.stopwatch import Stopwatch
from hypjax.objectives import Spec
from hypjax.parallel import processes
from hypjax.runs.checkpoints import SharedCheckpoints
from hypjax.system import console
from hypjax.training.head_init import pca_head
from hypjax.training.input import training_features
from hypjax.training.learner import Learner
from hypjax.training.optim import matches
from hypjax.training.setup import Setup, describe, rotates_only
from hypjax.training.step import TrainState, create_state, start_teacher
from hypjax.types import Recalls


class Measured(NamedTuple):
    """Scores measured so far; saved with each state."""

    untrained: dict[str, Recalls]  # On test and validation classes, before the first step.
    validation: Recalls | None = None  # The latest on the validation classes.

    def selecting(self, name: str) -> float | None:
        """Validation score that selects the best checkpoint: the head's score of this name."""
        return None if self.validation is None else self.validation["head"][name]


def begin(
    setup: Setup, checkpoints: SharedCheckpoints, pretrained: PyTree | None
) -> tuple[TrainState, Measured | None]:
    """Restores the run's latest state and scores, or creates the first state, without scores."""
    config, learner = setup.config, setup.learner
    state = random_state(learner, setup.spec)
    describe(setup, parameters=sum(x.size for x in jax.tree.leaves(state.params)))
    restored = restore(checkpoints, state)
    if restored is not None:
        console.say(f"continuing after step {int(restored[0].step)}")
        return restored
    warn_of_groups(state, config.optim, pretrained=config.model.weights is not None)
    pretrained = pretrained or starting_parameters(config, learner)
    state = with_pretrained(learner, state, pretrained)
    if config.model.head_init == "pca":
        state = with_pretrained(learner, state, {"head": _pca_head(setup, state)})
    return state, None


def _pca_head(setup: Setup, state: TrainState) -> PyTree:
    """The head's first parameters where `model.head_init` is 'pca', the same in all processes."""
    model, dim = state.params["model"], setup.learner.model.head_dim
    features = training_features(setup, model)
    rotating = rotates_only(setup.config, setup.splits.train)
    found = functools.partial(pca_head, features, dim, rotating=rotating)
    return processes.arrays_from_first(found, model["head"])


def score_untrained(setup: Setup, state: TrainState, stopwatch: Stopwatch) -> Measured:
    """Scores the first state, and counts that as evaluation."""
    console.say("evaluating before training")
    evaluator, splits, params = setup.evaluator, setup.splits, state.params["model"]
    with stopwatch.part("evaluation"):
        fitted = evaluator.fit(params, splits.train)
        scores = {"test": evaluator.test_scores(params, splits, fitted)}
        if splits.validation:
            scores["validation"] = evaluator.scores(params, Task(splits.validation), fitted)
    return Measured(untrained=scores, validation=scores.get("validation"))


def random_state(learner: Learner, spec: Spec) -> TrainState:
    """The state before the first step, of random parameters, on the learner's devices."""
    # One program: compiling one for each operation would take longer.
    state = jax.jit(lambda: create_state(learner, spec))()
    state = processes.arrays_from_first(lambda: state, state)
    return parallel.place(state, parallel.parameter_shardings(learner.mesh, state))


def starting_parameters(config: ConfigDict, learner: Learner) -> dict[str, PyTree] | None:
    """The parameters that `model.weights` names, sent to all processes; None for random ones."""
    loaded = ("encoder", "head") if config.model.load_head else ("encoder",)

    def read() -> dict[str, PyTree] | None:
        if config.model.weights is None:
            return None
        params = pretrained_parameters(config, learner.model)
        verb = "start" if len(loaded) > 1 else "starts"
        console.say(f"the {' and the '.join(loaded)} {verb} from {config.model.weights}")
        return params

    shapes = model_shapes(learner.model, learner.view)
    return processes.arrays_from_first(read, {part: shapes[part] for part in loaded})


def with_pretrained(
    learner: Learner, state: TrainState, params: dict[str, PyTree] | None
) -> TrainState:
    """Replaces parts of the model's parameters, and the teacher's, if there are pretrained ones."""
    if params is None:
        return state
    model = state.params["model"]
    old = {part: model[part] for part in params}
    new = jax.tree.map(lambda x, old: parallel.place(x, old.sharding), params, old)
    params = {**state.params, "model": {**model, **new}}
    teacher = start_teacher(learner, params)
    teacher = parallel.place(teacher, parallel.parameter_shardings(learner.mesh, teacher))
    return state._replace(params=params, teacher=teacher)


def warn_of_groups(state: TrainState, optim: ConfigDict, pretrained: bool) -> None:
    """Warns if `optim` names parameters that the model lacks, or freezes random ones."""
    paths = list(flatten_dict(state.params))
    for field in ("frozen", "groups"):
        for name in (each if field == "frozen" else each[0] for each in optim[field]):
            if not any(matches(parameter_path(name), path) for path in paths):
                console.warn(f"optim.{field} names {name}, but this model has no such parameters")
            elif field == "frozen" and not pretrained:
                console.warn(f"{name} stays random: it is frozen, and model.weights is None")


def save(
    checkpoints: SharedCheckpoints,
    state: TrainState,
    measured: Measured,
    score: float | None = None,
) -> None:
    """Saves a state unless it is saved already, the model apart from what only training needs."""
    step = int(state.step)
    if step not in checkpoints.steps:
        record = measured._asdict()
        checkpoints.save(step, record=record, score=score, **trees(state))


def restore(checkpoints: SharedCheckpoints, like: TrainState) -> tuple[TrainState, Measured] | None:
    """Restores the latest undamaged state; None if there is none."""
    restored = checkpoints.restore_latest(**trees(like))
    if restored is None:
        return None
    checkpoints.restore_best(model=like.params["model"])  # Reports damage now, not at the end.
    model, (objective, opt_state, objective_state, skipped, *rest) = restored.trees
    teacher = None if like.teacher is None else rest.pop(0)
    tuples = None if like.tuples is None else rest.pop(0)
    step = parallel.place(jnp.int32(restored.step), like.step.sharding)
    params = {"model": model, "objective": objective}
    state = TrainState(step, params, opt_state, objective_state, skipped, teacher, tuples)
    return state, Measured(**restored.record)


def trees(state: TrainState) -> dict[str, PyTree]:
    """The trees of a checkpoint: the model, and what only training needs, the objective first."""
    training = (
        state.params["objective"],
        state.opt_state,
        state.objective_state,
        state.skipped,
        *(part for part in (state.teacher, state.tuples) if part is not None),
    )
    return {"model": state.params["model"], "training": training}
