"""Training runs: their images, batches, objective and learner, built from a configuration."""

import dataclasses
import itertools
import math
from typing import Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict
from jaxtyping import Int, PyTree
from ml_collections import ConfigDict

from hypjax.config import flatten
from hypjax.config.choices import GROUPS, IN_MEMORY, freezes_encoder, matches, parameter_path
from hypjax.config.custom import code_hash
from hypjax.config.rules import FITTED_TO_IMAGES, refuse, validate_relations
from hypjax.data.dataset import Dataset
from hypjax.data.device_cache import CacheLayout, plan_layout
from hypjax.data.parts import Splits
from hypjax.data.plans import CLASS_PLANS, CoarsePairPlans, Plans, ShuffledPlans, TuplePlans
from hypjax.data.views import TRAIN_VIEWS
from hypjax.errors import UserError, nearest
from hypjax.inference.run import Run
from hypjax.models import compute_dtype
from hypjax.models.custom import CUSTOM_ENCODERS
from hypjax.models.split_at_block import highest_frozen
from hypjax.objectives import ProblemSizes
from hypjax.objectives.base import GROUPED
from hypjax.objectives.create import declaration
from hypjax.parallel import processes
from hypjax.runs.images import images_in_memory
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
    config, model, mesh = run.config, run.model, run.mesh
    if config.model.head_init == "pca" and model.head_dim > model.encoder.dim:
        rule = f"at most {model.encoder.dim}, the encoder's dimension, if model.head_init is pca"
        refuse("model.head_dim", model.head_dim, rule)
    train = _without_single_images(config, run.splits.training_images())
    splits = run.splits._replace(train=train)
    fitted = fit_to_images(config, splits)
    validate_relations(fitted)
    # An objective may depend on the sizes of batches.
    objective = run.objective if fitted is config else None
    parts = {"model": model, "mesh": mesh, "splits": splits, "objective": objective}
    run = TrainingRun(fitted, **parts, name=run.name, workdir=run.workdir)
    run.plans = plans = create_plans(fitted, splits)
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
    run.learner = learner = learner_of(run)
    check_paths(fitted, learner, run.spec)
    if fitted.train.cached_features and not freezes_encoder(fitted.optim.frozen):
        block = _highest_frozen_block(learner, run.spec)
        run.learner = dataclasses.replace(learner, cached_block=block)
    return run


def _without_single_images(config: ConfigDict, images: Dataset) -> Dataset:
    """Reports classes with a single image, and leaves them out if features are cached."""
    counts = np.bincount(images.labels)
    single = f"training classes with a single image: {np.sum(counts == 1)} of {len(counts)}"
    if config.train.unlabelled or config.train.sampling not in GROUPED or counts.min() > 1:
        return images
    if config.train.cached_features:  # A batch would repeat the same features.
        console.say(f"{single}; they are left out")
        return images.with_classes(np.flatnonzero(counts > 1))
    console.warn(f"{single}; such an image is compared with itself")
    return images


def check_paths(config: ConfigDict, learner: Learner, spec: ProblemSizes) -> None:
    """Rejects paths in `optim.frozen` and `optim.groups` that lead to no parameters.

    Names of `GROUPS` may lead to none, such as the patch projection in a ResNet.
    """
    optim = config.optim
    frozen = [name for name in optim.frozen if name not in GROUPS]
    groups = [name for name, *_ in optim.groups if name not in GROUPS]
    if not (frozen or groups) and learner.lora is None:
        return
    params = jax.eval_shape(lambda: create_state(learner, spec)).params  # Checks LoRA's targets.
    paths = flatten_dict(params)
    trained = flatten_dict(split_frozen(params, learner.frozen)[0])
    for field, names, allowed in (("frozen", frozen, paths), ("groups", groups, trained)):
        for name in names:
            if not any(matches(parameter_path(name), path) for path in allowed):
                known = {"/".join(path[:end]) for path in paths for end in range(2, len(path))}
                missing = f"{name}, but this model trains no such parameters"
                raise UserError(f"config.optim.{field} names {missing}{nearest(name, known)}")


def _highest_frozen_block(learner: Learner, spec: ProblemSizes) -> str:
    """The highest block whose output stays the same during training."""
    params = jax.eval_shape(lambda: create_state(learner, spec)).params
    encoder, trained = learner.model.encoder, split_frozen(params, learner.frozen)[0]["model"]
    block = highest_frozen(encoder, trained.get("encoder", {}))
    if block is None:
        known, lowest = params["model"]["encoder"], itertools.chain(*encoder.layers[:2])
        paths = ",".join(f"model/encoder/{name}" for name in lowest if name in known)
        rule = f"the encoder, or its lowest layers: at least {paths}"
        refuse("train.cached_features", True, f"False unless optim.frozen names {rule}")
    return block


def create_plans(config: ConfigDict, splits: Splits) -> Plans:
    """Plans a run's batches by `train.sampling`."""
    images, train = splits.train, config.train
    crop = TRAIN_VIEWS[config.data.train_view](config.data)
    sizes = crop.sizes(np.maximum(images.sizes, 1))  # Features from a file have no sizes or crops.
    labels = np.arange(len(images)) if train.unlabelled else images.labels
    common = (labels, sizes, train.batch_size, crop, config.seed)
    if train.sampling == "shuffled":
        if train.batch_size > len(images):
            rule = f"at most {len(images)}, the number of training images"
            refuse("train.batch_size", train.batch_size, rule)
        return ShuffledPlans(*common)
    if train.sampling == "tuples":
        return _tuple_plans(config, images, common)
    samples, classes = train.samples_per_class, int(labels.max()) + 1
    if train.batch_size // samples > classes:
        rule = f"at most {classes * samples}: {samples} images for each training class"
        refuse("train.batch_size", train.batch_size, rule)
    common += (samples, train.repeat_images)
    if train.sampling == "coarse_pairs":
        return CoarsePairPlans(*common, coarse=_coarsest_labels(config, images))
    return CLASS_PLANS[train.sampling](*common)


def _coarsest_labels(config: ConfigDict, images: Dataset) -> Int[np.ndarray, " classes"]:
    """The coarsest label of each class; checks that any two coarsest classes fill a batch."""
    train, levels = config.train, images.coarse_labels_of_classes()
    coarse = np.array(levels[-1] if levels and not train.unlabelled else (0,))
    if not coarse.any():
        rule = "another sampling, unless training classes lie in two or more coarse classes"
        refuse("train.sampling", train.sampling, rule)
    max_batch = np.sort(np.bincount(coarse))[:2].sum() * train.samples_per_class
    if train.batch_size > max_batch:
        rule = f"{train.samples_per_class} images for each class of the smallest two coarse classes"
        refuse("train.batch_size", train.batch_size, f"at most {max_batch}: {rule}")
    return coarse


def _tuple_plans(config: ConfigDict, images: Dataset, common: tuple[Any, ...]) -> TuplePlans:
    train, fields = config.train, config.train.tuples
    indices = np.full(len(images.records), -1)
    indices[images.positions] = np.arange(len(images))
    pairs = indices[np.zeros((0, 2), int) if images.pairs is None else images.pairs]
    pairs = pairs[(pairs >= 0).all(axis=1)]  # Drop pairs with an image outside the training split.
    if not len(pairs):
        problem = f"config.train.sampling is tuples, but {config.data.name} lists no pairs"
        raise UserError(f"{problem} of images; set data.name=sfm120k or scenes, or other sampling")
    tuples, pool_size = min(fields.pairs, len(pairs)), min(fields.pool, len(images))
    plans = TuplePlans(*common, pairs, tuples, fields.negatives, pool_size)
    if not plans.batches_per_epoch:
        rule = f"at most {plans.tuples * plans.tuple_size}, the images of an epoch's tuples"
        refuse("train.batch_size", train.batch_size, rule)
    return plans


def provenance(config: ConfigDict, splits: Splits | None = None) -> dict[str, str]:
    """Hashes of a run's images, code and precision, which must not change between resumes.

    Without splits, only hashes of code and images that a user passes from Python.
    """
    encoder = CUSTOM_ENCODERS.get(config.model.architecture)
    code = {"loss": declaration(config.objective.name).code, "encoder": encoder}
    hashes = {name: code_hash(value) for name, value in code.items() if value is not None}
    if splits is not None:
        hashes["images"] = splits.fingerprint
        hashes["precision"] = compute_dtype(config.model.precision).name
    elif config.data.name == IN_MEMORY:
        hashes["images"] = images_in_memory().source
    return hashes


def shared_provenance(run: TrainingRun) -> dict[str, str]:
    """The provenance of a run; checks that all processes have the same, and the same settings."""
    hashes, cache = provenance(run.config, run.splits), run.config.run.cache
    local = ("run.data_dir", "run.cache", "run.workers", "run.wandb", "data.path")
    shared = {n: v for n, v in flatten(run.config).items() if not n.startswith(local)}
    shared["run.cache"] = cache if cache == "device" else "none or host"
    shared = {f"config.{name}": value for name, value in shared.items()}
    processes.require_same({**hashes, **run.splits.fingerprints, **shared})
    return hashes


def print_summary(run: TrainingRun, params: PyTree) -> None:
    """Prints the numbers of parameters, images and batches."""
    trees = params, split_frozen(params, run.learner.frozen)[0]
    total, trained = (sum(x.size for x in jax.tree.leaves(tree)) for tree in trees)
    plans, devices = run.plans, run.mesh.devices
    splits = {n: getattr(run.splits, n) for n in ("train", "validation", "test", "gallery")}
    images = "; ".join(f"{name}: {split.describe()}" for name, split in splits.items() if split)
    counts = f"{total:,} parameters, {trained:,} of them trained,"
    console.say(f"{counts} on {devices.size} × {devices.flat[0].device_kind}; {images}")
    console.say(f"batches in an epoch: {plans.batches_per_epoch}")
    if isinstance(plans, TuplePlans):
        pairs = f"{plans.tuples} of {len(plans.pairs)} pairs in an epoch"
        console.say(f"{pairs}, each with {plans.negatives} negatives of {plans.pool_size} images")


_BATCH_SIZE = 64  # Images in a batch, if there are enough.
_CACHED_BATCH = 256  # Cached features cost little, and heads learn more from more classes.
_MIN_SAMPLES_PER_CLASS = 4  # Fewest images per class in a batch.
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
    fields, labels = config.train, splits.train.labels
    sizes = np.ones(len(labels), int) if fields.unlabelled else np.bincount(labels)
    usual_batch = _CACHED_BATCH if fields.cached_features else _BATCH_SIZE
    if fields.samples_per_class is None:
        fields.samples_per_class = _samples(sizes, fields.batch_size, usual_batch)
    if fields.batch_size is None:
        classes = min(len(sizes), max(usual_batch // fields.samples_per_class, 2))
        fields.batch_size = classes * fields.samples_per_class
    if fields.total_steps is None:
        fields.total_steps = _steps(config, len(splits.train))
    if config.optim.warmup_steps is None:
        config.optim.warmup_steps = fields.total_steps // 10
    chosen = ", ".join(f"{name}={flatten(config)[name]}" for name in unset)
    console.say(f"chosen for these images: {chosen}")
    return config


def _steps(config: ConfigDict, images: int) -> int:
    size = config.train.batch_size
    if config.model.head_init != "pca":
        return math.ceil(_SHOWN_IMAGES / size)
    if not freezes_encoder(config.optim.frozen):
        return math.ceil(_PASSES * images / size)
    return max(math.ceil(_HEAD_PASSES * images / size), _MIN_HEAD_STEPS)


def _samples(sizes: Int[np.ndarray, " classes"], batch_size: int | None, usual_batch: int) -> int:
    """Chooses the images per class: 4, or more if there are few classes with enough images."""
    batch = batch_size or usual_batch
    classes = max(min(len(sizes), batch // _MIN_SAMPLES_PER_CLASS), 2)
    preferred = max(2, int(min(batch // classes, np.quantile(sizes, 0.1))))
    if batch_size is None:
        return preferred
    # The number must divide a given batch size.
    fitting = [s for s in range(2, batch // 2 + 1) if batch % s == 0 and batch // s <= len(sizes)]
    if not fitting:
        rule = f"2 to {len(sizes)} classes times 2 or more images, such as {classes * preferred}"
        refuse("train.batch_size", batch_size, rule)
    return min(fitting, key=lambda s: (abs(s - preferred), s))
