"""Initial and restored states of a run, and heads that start from principal components."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, PyTree

from hypjax import parallel
from hypjax.errors import UserError
from hypjax.geometry.learned import named_scalars
from hypjax.monitoring.stopwatch import Stopwatch
from hypjax.objectives import ProblemSizes
from hypjax.parallel import processes
from hypjax.runs.checkpoints import Checkpoints
from hypjax.system import console
from hypjax.training.input import training_features
from hypjax.training.learner import Learner
from hypjax.training.optim import merge
from hypjax.training.setup import Training, print_summary
from hypjax.training.step import TrainState, create_state, evaluated_model, start_averages
from hypjax.types import Recalls

# Root mean square of the projected features' norms: twice Hyp-ViT's clip radius, so that almost all
# features are clipped, and the same learning rate suits all encoders.
_NORM = 4.6


class Measured(NamedTuple):
    """Scores so far, saved with each state."""

    untrained: dict[str, Any]  # Scores of each split, and learned scalars, before the first step.
    validation: Recalls | None = None  # The latest validation scores.
    best_steps: Sequence[int] = ()  # All steps with the highest validation score so far.


def restore_or_start(
    training: Training, checkpoints: Checkpoints, read_weights: Callable[[], PyTree | None]
) -> tuple[TrainState, Measured | None]:
    """Restores the run's latest state and scores, or creates its first state, without scores.

    `read_weights` returns the parameters with which a run starts, see `initialize`.
    """
    learner = training.learner
    shapes = sharded_shapes(learner, training.sizes)
    print_summary(training, shapes.params)
    restored = restore(checkpoints, learner, shapes)
    if restored is not None:
        console.say(f"continuing after step {int(restored[0].step)}")
        return restored
    # The encoder of features from a file has no parameters.
    start = training.experiment.method.start
    if start.weights is None and learner.model.encoder.takes_pixels:
        frozen = [name for name in learner.frozen if name != "space"]
        if frozen or learner.lora is not None:
            names = ", ".join(frozen or ["the encoder's kernels"])
            console.warn(f"{names} stay random: they are not trained, and model.weights is None")
    return initialize(training, read_weights()), None


def initialize(training: Training, pretrained: dict[str, PyTree] | None) -> TrainState:
    """Creates the first state of a run, with pretrained parameters, and `head_init`'s head."""
    learner = training.learner
    state = first_state(learner, training.sizes, pretrained)
    if training.experiment.method.start.head_init == "pca":
        model, dim = state.params["model"], learner.model.head_dim
        compute = functools.partial(pca_head, training_features(training, model), dim)
        head = processes.arrays_from_first(compute, model["head"])
        state = _with_parameters(learner, state, _placed(learner, {"head": head}))
    return state


def score_untrained(training: Training, state: TrainState, stopwatch: Stopwatch) -> Measured:
    """Scores the state before the first step."""
    experiment, params = training.experiment, evaluated_model(training.learner, state)
    if experiment.splits.tasks:
        console.say("evaluating before training")
    with stopwatch.part("evaluation"):
        scores = {"test": experiment.test_scores(params)}
        if experiment.splits.validation:
            scores["validation"] = experiment.validation_scores(params)
        if "scalars" in params:
            scores |= named_scalars(params["scalars"])
    return Measured(scores, scores.get("validation"), [0] if experiment.splits.validation else [])


def sharded_shapes(learner: Learner, sizes: ProblemSizes) -> TrainState:
    """The shapes of a state, and where its arrays or their parts lie."""
    return _sharded(learner, jax.eval_shape(lambda: create_state(learner, sizes)))


def _sharded(learner: Learner, shapes: PyTree) -> PyTree:
    shardings = parallel.parameter_shardings(learner.mesh, shapes)
    return jax.tree.map(lambda x, sharding: x.update(sharding=sharding), shapes, shardings)


def first_state(
    learner: Learner, sizes: ProblemSizes, pretrained: dict[str, PyTree] | None = None
) -> TrainState:
    """Creates the first state, on the learner's devices.

    Parameters are random, except for those that `pretrained` holds, by part of the model; the state
    takes the memory of those that are on the devices already.
    """

    def create(given: dict[str, PyTree]) -> TrainState:
        return _with_parameters(learner, create_state(learner, sizes), given)

    # One program of all devices, so that each makes only its parts, and all make the same numbers.
    # XLA leaves out random numbers that nobody reads: compiling Lite0's takes 10 s.
    given = _placed(learner, pretrained or {})
    shardings = parallel.parameter_shardings(learner.mesh, jax.eval_shape(create, given))
    return jax.jit(create, out_shardings=shardings, donate_argnums=0)(given)


def _placed(learner: Learner, parameters: dict[str, PyTree]) -> dict[str, PyTree]:
    return parallel.place(parameters, parallel.parameter_shardings(learner.mesh, parameters))


def _with_parameters(learner: Learner, state: TrainState, given: dict[str, PyTree]) -> TrainState:
    """Replaces parameters, by part of the model, and restarts the averages."""
    objective, landmarks = state.params["objective"], learner.objective.landmarks
    model = dict(given)
    if landmarks and landmarks.name in model:
        objective = {**objective, landmarks.name: model.pop(landmarks.name)}
    params = {"model": merge(state.params["model"], model), "objective": objective}
    return state._replace(params=params, **start_averages(learner, params))


def restore(
    checkpoints: Checkpoints, learner: Learner, like: TrainState
) -> tuple[TrainState, Measured] | None:
    """Restores the latest undamaged state, laid out as the given one; None if there is none."""
    expected = _sharded(learner, jax.eval_shape(functools.partial(trees, learner), like))
    restored = checkpoints.restore_latest(**expected)
    if restored is None:
        return None
    measured = Measured(**restored.record)
    best_step = [None, *measured.best_steps][-1]
    # Reports damage now, not at the end.
    best = checkpoints.restore_best(best_step, model=expected["model"])
    if best is not None and best.step != best_step:
        measured = measured._replace(best_steps=[best.step])
    model, training = restored.trees
    params = {"model": training.pop("model", model), "objective": training.pop("objective")}
    step = parallel.place(jnp.int32(restored.step), like.step.sharding)
    return like._replace(step=step, params=params, **training), measured


def trees(learner: Learner, state: TrainState) -> dict[str, PyTree]:
    """Trees of a checkpoint: the evaluated model, and everything that only training reads."""
    fields = state._asdict().items()
    training = {x: y for x, y in fields if y is not None and x not in ("step", "params")}
    training["objective"] = state.params["objective"]
    if learner.lora is not None or state.average is not None:
        training["model"] = state.params["model"]
    return {"model": evaluated_model(learner, state), "training": training}


def pca_head(features: Float[np.ndarray, "images dim"], dim: int) -> dict[str, np.ndarray]:
    """Computes a head that decorrelates features, and whitens them halfway.

    The head maps centred features to their principal components, by descending variance, each
    divided by the square root of its standard deviation. Full whitening, which divides by the
    standard deviation, would give noise, in directions of low variance, the same weight as other
    directions. Without whitening, a few directions would dominate.

    Variances are shrunk towards their mean, more strongly for fewer images (Ledoit and Wolf, "A
    well-conditioned estimator for large-dimensional covariance matrices", 2004), so that directions
    in which the images do not vary remain.

    Returns {"kernel": [features' dim, dim], "bias": [dim]}, float32. Raises a `UserError` if all
    features are equal.
    """
    mean = features.mean(axis=0, dtype=np.float64)
    centred = features - mean
    n, d = centred.shape
    covariance = centred.T @ centred / n
    mean_variance = np.trace(covariance) / d
    if not mean_variance > 0:
        raise UserError(
            "the encoder's embeddings of the training images are equal, or not finite; check "
            "model.weights, or set model.head_init=orthogonal"
        )
    squares = np.sum(covariance**2)
    # Sums over all coefficients of the squared distance to `mean_variance` times the identity, and
    # of the covariance's squared error (Lemmas 3.2 to 3.4; there, norms are divided by d).
    distance = squares - d * mean_variance**2
    squared_norms = np.einsum("nd,nd->n", centred, centred)
    error = (np.mean(squared_norms**2) - squares) / n
    shrinkage = min(error / distance, 1.0)
    variances, directions = np.linalg.eigh(covariance)  # By ascending variance.
    variances = (1 - shrinkage) * np.maximum(variances[::-1], 0) + shrinkage * mean_variance
    kernel = directions[:, ::-1][:, :dim] * variances[:dim] ** -0.25
    kernel *= _NORM / np.sqrt(np.sum(kernel * (covariance @ kernel)))
    return {"kernel": kernel.astype(np.float32), "bias": (-mean @ kernel).astype(np.float32)}
