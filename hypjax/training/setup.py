"""Training runs: their images, batches, objective and learner, built from a configuration."""

import dataclasses
import math
from typing import Any

import jax
import numpy as np
import optax
from flax.traverse_util import flatten_dict
from jaxtyping import Int, PyTree
from ml_collections import ConfigDict

from hypjax.config import flatten
from hypjax.config.choices import (
    GROUPED,
    GROUPS,
    IN_MEMORY,
    freezes_encoder,
    matches,
    parameter_path,
)
from hypjax.config.custom import code_hash
from hypjax.config.rules import FITTED_TO_IMAGES, refuse, validate_relations
from hypjax.data.dataset import Dataset
from hypjax.data.device_cache import CacheLayout, plan_layout
from hypjax.data.plans import CLASS_PLANS, CoarsePairPlans, Plans, ShuffledPlans, TuplePlans
from hypjax.data.splits import Splits
from hypjax.data.views import TRAIN_VIEWS
from hypjax.errors import UserError, nearest
from hypjax.inference.run import Run
from hypjax.models import compute_dtype
from hypjax.models.custom import CUSTOM_ENCODERS
from hypjax.models.split_at_block import highest_frozen
from hypjax.objectives import ProblemSizes
from hypjax.objectives.create import declaration
from hypjax.parallel import processes
from hypjax.runs.images import images_in_memory
from hypjax.settings import Watch
from hypjax.system import console
from hypjax.training.learner import Learner, learner_of
from hypjax.training.optim import split_frozen
from hypjax.training.step import create_state


class TrainingRun(Run):
    """A run with the attributes that only training needs."""

    plans: Plans
    spec: ProblemSizes
    learner: Learner
    layout: CacheLayout | None = None  # Layout of the device cache; None if the host crops images.


def build(run: Run | ConfigDict) -> TrainingRun:
    """Builds a training run, with the layout of its device cache; computes no parameters."""
    run = training_run(run if isinstance(run, Run) else Run(run))
    if run.config.run.cache == "device":
        run.layout = plan_layout(run.plans.sizes, run.mesh, run.config.data.channels)
    return run


def training_run(run: Run) -> TrainingRun:
    """Opens a run's training images, and fits its configuration to them."""
    config, model = run.config, run.model
    if config.model.head_init == "pca" and model.head_dim > model.encoder.dim:
        rule = f"at most {model.encoder.dim}, the encoder's dimension, if model.head_init is pca"
        refuse("model.head_dim", model.head_dim, rule)
    train = _without_single_images(config, run.splits.training_images())
    if config.train.patience and run.splits.validation is None:
        refuse("train.patience", config.train.patience, f"0: {run.splits.no_validation}")
    splits = run.splits._replace(train=train)
    fitted = fit_to_images(config, splits)
    validate_relations(fitted)
    # An objective may depend on the sizes of batches.
    objective = run.objective if fitted is config else None
    parts = {"model": model, "mesh": run.mesh, "splits": splits, "objective": objective}
    run = TrainingRun(fitted, **parts, name=run.name, workdir=run.workdir)
    plans = create_plans(fitted, splits)
    run.plans = plans
    run.spec = ProblemSizes(
        classes=len(train) if fitted.train.unlabelled else train.num_classes,
        samples_per_class=fitted.train.samples_per_class,
        encoder_dim=model.encoder.dim,
        head_dim=model.head_dim,
        training_images=len(train),
        batch_size=fitted.train.batch_size,
        tuples=(plans.tuples, plans.tuple_size) if isinstance(plans, TuplePlans) else (0, 0),
        coarse_labels=() if fitted.train.unlabelled else train.coarse_labels_of_classes(),
    )
    # Lets the objective reject sizes that do not suit it, before the run has a folder.
    jax.eval_shape(lambda: run.objective.init(jax.random.key(0), run.spec))
    run.learner = learner_of(run)
    check_paths(fitted, run.learner, run.spec)
    if fitted.train.cached_features and not freezes_encoder(fitted.optim.frozen):
        block = _highest_frozen_block(run.learner, run.spec)
        run.learner = dataclasses.replace(run.learner, cached_block=block)
    return run


def _without_single_images(config: ConfigDict, images: Dataset) -> Dataset:
    """Reports classes with a single image, and leaves them out if features are cached."""
    counts = np.bincount(images.labels)
    if config.train.unlabelled or config.train.sampling not in GROUPED or counts.min() > 1:
        return images
    summary = f"training classes with a single image: {np.sum(counts == 1)} of {len(counts)}"
    if config.train.cached_features:  # A batch would repeat the same features.
        console.say(f"{summary}; they are left out")
        return images.with_classes(np.flatnonzero(counts > 1))
    console.warn(f"{summary}; such an image is compared with itself")
    return images


def check_paths(config: ConfigDict, learner: Learner, spec: ProblemSizes) -> None:
    """Rejects paths in `optim.frozen` and `optim.groups` that lead to no parameters."""
    # Names of `GROUPS` may lead to none, such as the patch projection in a ResNet.
    frozen = [name for name in config.optim.frozen if name not in GROUPS]
    groups = [name for name, *_ in config.optim.groups if name not in GROUPS]
    if not (frozen or groups) and learner.lora is None:
        return
    params = jax.eval_shape(lambda: create_state(learner, spec)).params  # Checks LoRA's targets.
    paths = flatten_dict(params)
    trained_paths = flatten_dict(split_frozen(params, learner.frozen)[0])
    for field, names, allowed in (("frozen", frozen, paths), ("groups", groups, trained_paths)):
        for name in names:
            if not any(matches(parameter_path(name), path) for path in allowed):
                known = {"/".join(path[:end]) for path in paths for end in range(2, len(path))}
                problem = f"config.optim.{field} names {name}, but this model trains no such"
                raise UserError(f"{problem} parameters{nearest(name, known)}")


def _highest_frozen_block(learner: Learner, spec: ProblemSizes) -> str:
    """The highest block whose output stays the same during training."""
    params = jax.eval_shape(lambda: create_state(learner, spec)).params
    encoder, trained = learner.model.encoder, split_frozen(params, learner.frozen)[0]["model"]
    block = highest_frozen(encoder, trained.get("encoder", {}))
    if block is None:
        lowest = [name for layer in encoder.layers[:2] for name in layer]
        lowest = [name for name in lowest if name in params["model"]["encoder"]]
        paths = ",".join(f"model/encoder/{name}" for name in lowest)
        rule = f"the encoder, or its lowest layers: at least {paths}"
        refuse("train.cached_features", True, f"False unless optim.frozen names {rule}")
    return block


def create_plans(config: ConfigDict, splits: Splits) -> Plans:
    """Plans a run's batches by `train.sampling`."""
    images, train = splits.train, config.train
    crop = TRAIN_VIEWS[config.data.train_view](config.data)
    sizes = crop.sizes(np.maximum(images.sizes, 1))  # Features from a file have no sizes or crops.
    labels = np.arange(len(images)) if train.unlabelled else images.labels
    common_args = (labels, sizes, train.batch_size, crop, config.seed)
    if train.sampling == "shuffled":
        if train.batch_size > len(images):
            rule = f"at most {len(images)}, the number of training images"
            refuse("train.batch_size", train.batch_size, rule)
        return ShuffledPlans(*common_args)
    if train.sampling == "tuples":
        return _tuple_plans(config, images, common_args)
    samples, num_classes = train.samples_per_class, int(labels.max()) + 1
    if train.batch_size // samples > num_classes:
        rule = f"at most {num_classes * samples}: {samples} images for each training class"
        refuse("train.batch_size", train.batch_size, rule)
    common_args += (samples, train.repeat_images)
    if train.sampling == "coarse_pairs":
        return CoarsePairPlans(*common_args, coarse=_coarsest_labels(config, images))
    return CLASS_PLANS[train.sampling](*common_args)


def _coarsest_labels(config: ConfigDict, images: Dataset) -> Int[np.ndarray, " classes"]:
    """The coarsest label of each class; checks that any two coarsest classes fill a batch."""
    train, levels = config.train, images.coarse_labels_of_classes()
    coarse = np.array(levels[-1] if levels and not train.unlabelled else (0,))
    if not coarse.any():  # All classes lie in one coarse class.
        rule = "another sampling, unless training classes lie in two or more coarse classes"
        refuse("train.sampling", train.sampling, rule)
    max_batch = np.sort(np.bincount(coarse))[:2].sum() * train.samples_per_class
    if train.batch_size > max_batch:
        rule = f"{train.samples_per_class} images for each class of the smallest two coarse classes"
        refuse("train.batch_size", train.batch_size, f"at most {max_batch}: {rule}")
    return coarse


def _tuple_plans(config: ConfigDict, images: Dataset, common_args: tuple[Any, ...]) -> TuplePlans:
    """Plans tuples from the dataset's pairs of training images; checks that they fill a batch."""
    fields = config.train.tuples
    row_of_position = np.full(len(images.records), -1)  # -1 outside the training split.
    row_of_position[images.positions] = np.arange(len(images))
    pairs = row_of_position[np.zeros((0, 2), int) if images.pairs is None else images.pairs]
    pairs = pairs[(pairs >= 0).all(axis=1)]
    if not len(pairs):
        problem = f"config.train.sampling is tuples, but {config.data.name} lists no pairs"
        raise UserError(f"{problem} of images; set data.name=sfm120k or scenes, or other sampling")
    num_tuples, pool_size = min(fields.pairs, len(pairs)), min(fields.pool, len(images))
    plans = TuplePlans(*common_args, pairs, num_tuples, fields.negatives, pool_size)
    if not plans.batches_per_epoch:
        rule = f"at most {plans.tuples * plans.tuple_size}, the images of an epoch's tuples"
        refuse("train.batch_size", config.train.batch_size, rule)
    return plans


def provenance(config: ConfigDict, splits: Splits | None = None) -> dict[str, str]:
    """Hashes of images and code, and the precision, which must stay the same when a run resumes.

    Without splits, only hashes of code and images that a user passes from Python.
    """
    encoder = CUSTOM_ENCODERS.get(config.model.architecture)
    code = {"loss": declaration(config.objective.name).code, "encoder": encoder}
    facts = {name: code_hash(value) for name, value in code.items() if value is not None}
    if splits is not None:
        facts |= splits.provenance
        facts["precision"] = compute_dtype(config.model.precision).name
    elif config.data.name == IN_MEMORY:
        facts["images"] = images_in_memory().records_fingerprint
    return facts


def shared_provenance(run: Run) -> dict[str, str]:
    """The provenance of a run; checks that it and the settings are the same in all processes."""
    facts, cache = provenance(run.config, run.splits), run.config.run.cache
    local = ("run.data_dir", "run.cache", "run.workers", "run.wandb", "data.path")
    shared = {name: v for name, v in flatten(run.config).items() if not name.startswith(local)}
    shared["run.cache"] = cache if cache == "device" else "none or host"
    settings = {f"config.{name}": value for name, value in shared.items()}
    processes.require_same({**facts, **run.splits.fingerprints, **settings})
    return facts


def watch_of(config: ConfigDict) -> Watch:
    """When a run's steps are reported as faulty, or end it."""
    train = config.train
    return Watch(
        batch_size=train.batch_size,
        samples_per_class=train.samples_per_class,
        total_steps=train.total_steps,
        warmup_steps=config.optim.warmup_steps,
        stops_on_collapse=train.on_collapse == "stop",
        max_skipped=train.max_nonfinite if train.on_nonfinite == "skip" else 0,
    )


def print_summary(run: TrainingRun, params: PyTree) -> None:
    """Prints the numbers of parameters, images and batches."""
    trained_params, _ = split_frozen(params, run.learner.frozen)
    total, trained = optax.tree.size(params), optax.tree.size(trained_params)
    counts = f"{total:,} parameters, {trained:,} of them trained,"
    splits = {x: getattr(run.splits, x) for x in ("train", "validation", "test", "gallery")}
    images = "; ".join(f"{name}: {split.describe()}" for name, split in splits.items() if split)
    devices = run.mesh.devices
    console.say(f"{counts} on {devices.size} × {devices.flat[0].device_kind}; {images}")
    console.say(f"batches in an epoch: {run.plans.batches_per_epoch}")
    if isinstance(plans := run.plans, TuplePlans):
        pairs = f"{plans.tuples} of {len(plans.pairs)} pairs in an epoch"
        console.say(f"{pairs}, each with {plans.negatives} negatives of {plans.pool_size} images")


_BATCH_SIZE = 64  # Images in a batch, if there are enough.
_CACHED_BATCH_SIZE = 256  # Cached features cost little, and heads learn more from more classes.
_USUAL_SAMPLES = 4  # Images per class in a batch, if there are enough of both.
_SHOWN_IMAGES = 64_000  # Images that training shows, with repetitions: minutes on two cores.
# Passes over the images if the head starts from principal components: for the head only, whose
# steps are cheap, or also for trained blocks, which learn faster. With more passes, recall of
# held-out classes of Cars-196 falls again.
_HEAD_PASSES, _PASSES = 25, 4
_MIN_HEAD_STEPS = 200  # With few classes, 25 passes are too few steps; see docs/own-images.md.


def fit_to_images(config: ConfigDict, splits: Splits) -> ConfigDict:
    """Returns the configuration with its None fields set to suit the training images."""
    unset = [name for name in FITTED_TO_IMAGES if flatten(config)[name] is None]
    if not unset:
        return config
    config = config.copy_and_resolve_references()
    train, labels = config.train, splits.train.labels
    class_sizes = np.ones(len(labels), int) if train.unlabelled else np.bincount(labels)
    usual_batch_size = _CACHED_BATCH_SIZE if train.cached_features else _BATCH_SIZE
    if train.samples_per_class is None:
        train.samples_per_class = _fit_samples(class_sizes, train.batch_size, usual_batch_size)
    if train.batch_size is None:
        num_classes = min(len(class_sizes), max(usual_batch_size // train.samples_per_class, 2))
        train.batch_size = num_classes * train.samples_per_class
    if train.total_steps is None:
        train.total_steps = _fit_steps(config, len(labels))
    if config.optim.warmup_steps is None:
        config.optim.warmup_steps = train.total_steps // 10
    chosen = ", ".join(f"{name}={flatten(config)[name]}" for name in unset)
    console.say(f"chosen for these images: {chosen}")
    return config


def _fit_steps(config: ConfigDict, num_images: int) -> int:
    batch_size = config.train.batch_size
    if config.model.head_init != "pca":
        return math.ceil(_SHOWN_IMAGES / batch_size)
    if not freezes_encoder(config.optim.frozen):
        return math.ceil(_PASSES * num_images / batch_size)
    return max(math.ceil(_HEAD_PASSES * num_images / batch_size), _MIN_HEAD_STEPS)


def _fit_samples(
    class_sizes: Int[np.ndarray, " classes"], given_batch_size: int | None, usual_batch_size: int
) -> int:
    """Chooses the images per class: 4, or more with few classes, or fewer with small classes."""
    batch_size = given_batch_size or usual_batch_size
    num_classes = max(min(len(class_sizes), batch_size // _USUAL_SAMPLES), 2)
    # Up to a tenth of the classes may have fewer images.
    preferred = max(2, int(min(batch_size // num_classes, np.quantile(class_sizes, 0.1))))
    if given_batch_size is None:
        return preferred
    divisors = [n for n in range(2, batch_size // 2 + 1) if batch_size % n == 0]
    allowed = [n for n in divisors if batch_size // n <= len(class_sizes)]
    if not allowed:
        example = num_classes * preferred
        rule = f"2 to {len(class_sizes)} classes times 2 or more images, such as {example}"
        refuse("train.batch_size", batch_size, rule)
    return min(allowed, key=lambda samples: (abs(samples - preferred), samples))
