"""Opens trained runs with the same test images, and embeds these images for analyses."""

import contextlib
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Self

import jax
import numpy as np
from jaxtyping import Float, Int, PyTree

from hypjax.assemble import saved_experiment, saved_training
from hypjax.data.dataset import Dataset
from hypjax.data.groupings import Grouping, groupings
from hypjax.data.splits import Splits
from hypjax.errors import UserError, counted, redacted
from hypjax.experiment.experiment import Experiment
from hypjax.experiment.trained import restore_best
from hypjax.geometry import Space
from hypjax.inference.pretrained import starting_parameters
from hypjax.runs.checkpoints import Checkpoints
from hypjax.runs.cloud_copy import reading
from hypjax.runs.files import CHECKPOINTS, RESULTS, read_object
from hypjax.runs.workdir import require_provenance
from hypjax.system import console
from hypjax.system.caches import keep_compiled_programs
from hypjax.training import states
from hypjax.training.step import create_state, evaluated_model

Points = Float[np.ndarray, "images dim"]  # Embedded images.


def open_runs(workdirs: Sequence[str], overrides: Sequence[str] = ()) -> list[Experiment]:
    """Opens runs, which must have the same test images; names each by its folder.

    Prints which runs are unfinished. `overrides` are as for `saved_experiment`.
    """
    keep_compiled_programs()
    workdirs = list(dict.fromkeys(map(str, workdirs)))
    names = [os.path.basename(os.path.abspath(workdir)) for workdir in workdirs]
    if len(set(names)) < len(names):
        names = list(map(redacted, workdirs))
    runs = []
    for workdir, name in zip(workdirs, names, strict=True):
        with reading(workdir) as folder:
            runs.append(saved_experiment(folder, overrides, name=name, workdir=workdir))
            if read_object(folder / RESULTS) is None:
                console.say(f"{redacted(workdir)} is not finished; its model so far is used")
        first, last = runs[0].splits, runs[-1].splits
        if not len(last.test):
            raise UserError(f"{redacted(workdir)} has no test images: {last.notes[0]}")
        if first.fingerprint != last.fingerprint or not all(
            np.array_equal(a.positions, b.positions) and np.array_equal(a.labels, b.labels)
            for a, b in ((first.test, last.test), (searched(first), searched(last)))
        ):
            folders = f"{redacted(runs[0].workdir)} and {redacted(workdir)}"
            raise UserError(f"the runs in {folders} have different test images or test classes")
    return runs


def searched(splits: Splits) -> Dataset:
    """The images among which the test images are searched: the gallery, or each other."""
    return splits.gallery or splits.test


class ChosenImages(NamedTuple):
    """A random subset of a run's test images, of whole classes where possible."""

    dataset: Dataset
    indices: Int[np.ndarray, " images"]  # Among all test images.
    groupings: Mapping[str, Grouping]  # By name, the classes first.
    summary: str  # Numbers of images and classes.

    @classmethod
    def of(cls, run: Experiment, limit: int, seed: int) -> Self:
        """Chooses up to `limit` images: random whole classes, or any if two classes do not fit."""
        test, rng = run.splits.test, np.random.default_rng(seed)
        classes, counts = np.unique(test.labels, return_counts=True)
        chosen_classes = []
        room = limit
        for i in rng.permutation(len(classes)):
            if counts[i] <= room:
                chosen_classes.append(classes[i])
                room -= counts[i]
        indices = np.flatnonzero(np.isin(test.labels, chosen_classes))
        if len(chosen_classes) < 2:
            indices = np.sort(rng.permutation(len(test))[:limit])
        images = test.take(indices)
        if images.num_classes in (1, len(images)):
            raise UserError("too few images: two of one class and one of another are needed")
        num_classes = f"{images.num_classes} of {test.num_classes} classes"
        summary = f"{len(images)} of {len(test)} test images, {num_classes}"
        return cls(images, indices, groupings(run.method.fields["data.name"], images), summary)


def restore_trained(run: Experiment) -> PyTree:
    """Restores the parameters of a run's best or else last model.

    Raises a `UserError` if the run's images have changed since its training.
    """
    with reading(run.workdir) as folder:
        require_provenance(folder, run.image_provenance)
        return restore_best(folder, run.method).params


class ScoredHead(NamedTuple):
    """A trained head as evaluation compares its outputs, without `eval.pca`."""

    embed: Callable[[Dataset], Points]  # See `head_points`.
    space: Space  # The objective's `score_space`.
    proxies: Float[np.ndarray, "p dim"] | None  # HIER's proxies; None for other losses.


def scored_head(run: Experiment) -> ScoredHead:
    """Restores the head of a run's best or else last model, with the proxies of the same step."""
    params, proxies = restore_trained(run), None
    if landmarks := run.method.objective.landmarks:
        # One checksum covers the objective's parameters and the optimiser's state: read both.
        with (
            reading(run.workdir, training=True) as folder,
            contextlib.closing(Checkpoints(folder / CHECKPOINTS, read_only=True)) as checkpoints,
        ):
            built = saved_training(folder, run)
            learner, sizes = built.learner, built.sizes
            shapes = jax.eval_shape(lambda: states.trees(learner, create_state(learner, sizes)))
            restored = checkpoints.restore_best(**shapes) or checkpoints.restore_latest(**shapes)
        if restored is None:
            raise UserError(f"{redacted(run.workdir)} holds no checkpoint; train first")
        params, training = restored.trees
        proxies = training["objective"][landmarks.name]
    objective = run.method.trained_objective(params)
    space = objective.score_space
    if proxies is not None and objective.landmarks:
        proxies = np.asarray(objective.landmarks.points(proxies))
        space.check(proxies)
    return ScoredHead(functools.partial(head_points, run, params, space), space, proxies)


def untrained_parameters(run: Experiment) -> PyTree:
    """The model's parameters before the first step of a run, random or pretrained."""
    with reading(run.workdir) as folder:
        training = saved_training(folder, run)
    state = states.initialize(training, starting_parameters(run.method))
    return evaluated_model(training.learner, state)


def head_points(run: Experiment, params: PyTree, space: Space, dataset: Dataset) -> Points:
    """Embeds a dataset with the head, without the run's `eval.pca`."""
    console.say(f"embedding {counted(len(dataset), 'image')} with the model of {run.name}")
    points = run.embedder.points(params, dataset, {"head": space})["head"]
    space.check(points)
    return points
