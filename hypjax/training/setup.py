"""What training adds to an experiment: plans of batches, sizes, and checks of both."""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np
import optax
from flax.traverse_util import flatten_dict
from jaxtyping import Int, PyTree

from hypjax.config.choices import GROUPED, GROUPS, matches, parameter_path
from hypjax.config.rules import refuse
from hypjax.data.dataset import Dataset
from hypjax.data.device_cache import CacheLayout
from hypjax.data.plans import (
    CLASS_PLANS,
    BoxPlans,
    CoarsePairPlans,
    Plans,
    ShuffledPlans,
    TuplePlans,
)
from hypjax.data.views import TrainView
from hypjax.errors import UserError, nearest
from hypjax.experiment.experiment import Experiment
from hypjax.models import Embedder
from hypjax.models.split_at_block import highest_frozen
from hypjax.objectives import ProblemSizes
from hypjax.settings import Sampling, Schedule, Watch
from hypjax.system import console
from hypjax.training.learner import Learner
from hypjax.training.optim import split_frozen
from hypjax.training.step import create_state


@dataclasses.dataclass(frozen=True, eq=False)
class Training:
    """An experiment with what only its training needs.

    Attributes:
        experiment: The experiment, whose method has the sizes fitted to the images.
        images: The training images.
        learner: What a train step is compiled from.
        sizes: The sizes that the objective asks for.
        plans: The batches of all steps.
        layout: Layout of the device cache; None if the host crops images.
        schedule: When training validates, saves and ends.
        watch: When faulty steps are reported.
    """

    experiment: Experiment
    images: Dataset
    learner: Learner
    sizes: ProblemSizes
    plans: Plans
    layout: CacheLayout | None
    schedule: Schedule
    watch: Watch


def without_single_images(images: Dataset, sampling: Sampling, *, cached: bool) -> Dataset:
    """Reports classes with a single image, and leaves them out if features are `cached`."""
    counts = np.bincount(images.labels)
    if sampling.unlabelled or sampling.name not in GROUPED or counts.min() > 1:
        return images
    summary = f"training classes with a single image: {np.sum(counts == 1)} of {len(counts)}"
    if cached:  # A batch would repeat the same features.
        console.say(f"{summary}; they are left out")
        return images.with_classes(np.flatnonzero(counts > 1))
    console.warn(f"{summary}; such an image is compared with itself")
    return images


def problem_sizes(
    model: Embedder, images: Dataset, sampling: Sampling, plans: Plans
) -> ProblemSizes:
    """The sizes of the images and batches with which a model is trained."""
    unlabelled = sampling.unlabelled
    return ProblemSizes(
        classes=len(images) if unlabelled else images.num_classes,
        samples_per_class=sampling.samples_per_class,
        encoder_dim=model.encoder.dim,
        head_dim=model.head_dim,
        training_images=len(images),
        batch_size=sampling.batch_size,
        tuples=(plans.tuples, plans.tuple_size) if isinstance(plans, TuplePlans) else (0, 0),
        coarse_labels=() if unlabelled else images.coarse_labels_of_classes(),
    )


def check_paths(learner: Learner, sizes: ProblemSizes, groups: Sequence[str]) -> None:
    """Rejects frozen paths, and paths of groups of the optimiser, that lead to no parameters."""
    # Names of `GROUPS` may lead to none, such as the patch projection in a ResNet.
    frozen = [name for name in learner.frozen if name not in GROUPS]
    groups = [name for name in groups if name not in GROUPS]
    if not (frozen or groups) and learner.lora is None:
        return
    params = jax.eval_shape(lambda: create_state(learner, sizes)).params  # Checks LoRA's targets.
    paths = flatten_dict(params)
    trained_paths = flatten_dict(split_frozen(params, learner.frozen)[0])
    for field, names, allowed in (("frozen", frozen, paths), ("groups", groups, trained_paths)):
        for name in names:
            if not any(matches(parameter_path(name), path) for path in allowed):
                known = {"/".join(path[:end]) for path in paths for end in range(2, len(path))}
                problem = f"config.optim.{field} names {name}, but this model trains no such"
                raise UserError(f"{problem} parameters{nearest(name, known)}")


def highest_frozen_block(learner: Learner, sizes: ProblemSizes) -> str:
    """The highest block whose output stays the same during training."""
    params = jax.eval_shape(lambda: create_state(learner, sizes)).params
    encoder, trained = learner.model.encoder, split_frozen(params, learner.frozen)[0]["model"]
    block = highest_frozen(encoder, trained.get("encoder", {}))
    if block is None:
        lowest = [name for layer in encoder.layers[:2] for name in layer]
        lowest = [name for name in lowest if name in params["model"]["encoder"]]
        paths = ",".join(f"model/encoder/{name}" for name in lowest)
        rule = f"the encoder, or its lowest layers: at least {paths}"
        refuse("train.cached_features", True, f"False unless optim.frozen names {rule}")
    return block


def create_plans(
    images: Dataset, sampling: Sampling, crop: TrainView, *, name: str = "the dataset"
) -> Plans:
    """Plans a run's batches; `name` of the dataset is for messages."""
    size, samples = sampling.batch_size, sampling.samples_per_class
    sizes = crop.sizes(np.maximum(images.sizes, 1))  # Features from a file have no sizes or crops.
    labels = np.arange(len(images)) if sampling.unlabelled else images.labels
    if sampling.name == "boxes":
        row_of = {name: row for row, name in enumerate(images.names)}
        owners = np.array([row_of[name] for name in _owners(images, name)])
        most = 2 * len({*owners.tolist()})
        if size > most:
            refuse("train.batch_size", size, f"at most {most}, the images and a box of each")
        return BoxPlans(labels, sizes, size, crop, sampling.seed, owners)
    if sampling.name == "shuffled":
        if size > len(images):
            refuse(
                "train.batch_size", size, f"at most {len(images)}, the number of training images"
            )
        return ShuffledPlans(labels, sizes, size, crop, sampling.seed)
    if sampling.name == "tuples":
        pairs = _training_pairs(images, name)
        num_tuples, pool_size = min(sampling.pairs, len(pairs)), min(sampling.pool, len(images))
        plans = TuplePlans(
            labels,
            sizes,
            size,
            crop,
            sampling.seed,
            pairs,
            num_tuples,
            sampling.negatives,
            pool_size,
        )
        if not plans.batches_per_epoch:
            most = plans.tuples * plans.tuple_size
            refuse("train.batch_size", size, f"at most {most}, the images of an epoch's tuples")
        return plans
    num_classes = int(labels.max()) + 1
    if size // samples > num_classes:
        rule = f"at most {num_classes * samples}: {samples} images for each training class"
        refuse("train.batch_size", size, rule)
    seed, repeats = sampling.seed, sampling.repeats_images
    if sampling.name == "coarse_pairs":
        coarse = _coarsest_labels(images, sampling)
        return CoarsePairPlans(labels, sizes, size, crop, seed, samples, repeats, coarse=coarse)
    return CLASS_PLANS[sampling.name](labels, sizes, size, crop, seed, samples, repeats)


def _owners(images: Dataset, name: str) -> Sequence[str]:
    """Names of the images of which rows are boxes; checks that there are boxes."""
    if images.owners is None:
        advice = "add a column box (left, top, right, bottom), or choose a variant such as meru"
        raise UserError(f"{name} has no boxes of images to train on; {advice}")
    return images.owners.tolist()


def _coarsest_labels(images: Dataset, sampling: Sampling) -> Int[np.ndarray, " classes"]:
    """The coarsest label of each class; checks that any two coarsest classes fill a batch."""
    levels, samples = images.coarse_labels_of_classes(), sampling.samples_per_class
    coarse = np.array(levels[-1] if levels and not sampling.unlabelled else (0,))
    if not coarse.any():  # All classes lie in one coarse class.
        rule = "another sampling, unless training classes lie in two or more coarse classes"
        refuse("train.sampling", sampling.name, rule)
    max_batch = np.sort(np.bincount(coarse))[:2].sum() * samples
    if sampling.batch_size > max_batch:
        rule = f"{samples} images for each class of the smallest two coarse classes"
        refuse("train.batch_size", sampling.batch_size, f"at most {max_batch}: {rule}")
    return coarse


def _training_pairs(images: Dataset, name: str) -> Int[np.ndarray, "pairs 2"]:
    """The dataset's pairs of training images, as rows of the training images."""
    row_of_position = np.full(len(images.records), -1)  # -1 outside the training split.
    row_of_position[images.positions] = np.arange(len(images))
    pairs = row_of_position[np.zeros((0, 2), int) if images.pairs is None else images.pairs]
    pairs = pairs[(pairs >= 0).all(axis=1)]
    if not len(pairs):
        problem = f"config.train.sampling is tuples, but {name} lists no pairs"
        raise UserError(f"{problem} of images; set data.name=sfm120k or scenes, or other sampling")
    return pairs


def print_summary(training: Training, params: PyTree) -> None:
    """Prints the numbers of parameters, images and batches."""
    experiment, plans = training.experiment, training.plans
    trained_params, _ = split_frozen(params, training.learner.frozen)
    total, trained = optax.tree.size(params), optax.tree.size(trained_params)
    counts = f"{total:,} parameters, {trained:,} of them trained,"
    splits = {x: getattr(experiment.splits, x) for x in ("train", "validation", "test", "gallery")}
    images = "; ".join(f"{name}: {split.describe()}" for name, split in splits.items() if split)
    devices = experiment.mesh.devices
    console.say(f"{counts} on {devices.size} × {devices.flat[0].device_kind}; {images}")
    console.say(plans.describe())
    if isinstance(plans, TuplePlans):
        pairs = f"{plans.tuples} of {len(plans.pairs)} pairs in an epoch"
        console.say(f"{pairs}, each with {plans.negatives} negatives of {plans.pool_size} images")
