"""From a configuration to everything a run computes with."""

from typing import Any, NamedTuple

import jax
import numpy as np
from ml_collections import ConfigDict

from hypjax.config import flatten, validate
from hypjax.data.dataset import Dataset
from hypjax.data.device_cache import CacheLayout, plan_layout
from hypjax.data.parts import Splits
from hypjax.data.plans import (
    ClassPlans,
    DrawnClassPlans,
    EpochClassPlans,
    Plans,
    ShuffledPlans,
    TuplePlans,
)
from hypjax.data.splits import open_splits
from hypjax.data.views import TRAIN_VIEWS
from hypjax.errors import UserError
from hypjax.inference.datasets import evaluation_input
from hypjax.inference.evaluator import Evaluator, check_depth, create_evaluator
from hypjax.models import compute_dtype, create_embedder
from hypjax.objectives import Spec
from hypjax.system import console
from hypjax.training.fitting import fit_to_images
from hypjax.training.learner import Learner, build_learner


class Setup(NamedTuple):
    """What a configuration means.

    Attributes:
        config: The configuration, with all fields filled in.
        learner: Model, objective, optimiser and devices.
        spec: What the objective may need to know of the run.
        splits: The images.
        plans: The batches of all steps.
        layout: Layout of the device cache, or None if the host crops images.
        evaluator: Scores the model.
    """

    config: ConfigDict
    learner: Learner
    spec: Spec
    splits: Splits
    plans: Plans
    layout: CacheLayout | None
    evaluator: Evaluator


def build(config: ConfigDict) -> Setup:
    """Builds a run from its configuration; nothing is computed or written yet.

    Raises:
        UserError: The model, the objective, the images, the batches or the devices do not fit
            together.
    """
    create_embedder(config)  # Reports an unknown model before any image is read.
    splits = open_splits(config)
    train = splits.training_images()
    if config.train.cached_features:
        splits = splits._replace(train=_with_pairs(train))
    config = fit_to_images(config, splits.train)
    validate(config)
    learner = build_learner(config)
    check_depth(config, splits)
    plans = create_plans(config, splits)
    spec = create_spec(learner, splits, config.train)
    if isinstance(plans, TuplePlans):
        spec = spec._replace(tuples=(plans.tuples, plans.tuple_size))
    # An objective refuses sizes that do not suit it, before the run has a folder.
    jax.eval_shape(lambda: learner.objective.init(jax.random.key(0), spec))
    layout = None
    if config.run.cache == "device":
        scalable = config.data.train_view == "area_crop"
        channels = learner.view.channels
        layout = plan_layout(plans.sizes, learner.mesh, channels, scalable=scalable)
    return Setup(
        config=config,
        learner=learner,
        spec=spec,
        splits=splits,
        plans=plans,
        layout=layout,
        evaluator=create_evaluator(
            config, source=evaluation_input(config, learner.mesh), splits=splits
        ),
    )


def _with_pairs(train: Dataset) -> Dataset:
    """Leaves out classes with one image, whose cached features equal themselves."""
    paired = np.flatnonzero(np.bincount(train.labels) > 1)
    if len(paired) < train.num_classes:
        console.say(f"{train.num_classes - len(paired)} classes with one image are left out")
    return train.with_classes(paired)


def create_spec(learner: Learner, splits: Splits, train: ConfigDict) -> Spec:
    """What the objective may need to know of the run, from `config.train` among others."""
    return Spec(
        classes=splits.train.num_classes,
        samples_per_class=train.samples_per_class,
        encoder_dim=learner.model.encoder.dim,
        head_dim=learner.model.head_dim,
        training_images=len(splits.train),
        batch_size=train.batch_size,
    )


def create_plans(config: ConfigDict, splits: Splits) -> Plans:
    """The batches of a run.

    Raises:
        UserError: A batch asks for more classes, or more images, than there are.
    """
    images, train = splits.train, config.train
    crop = TRAIN_VIEWS[config.data.train_view](config.data)
    common = (images.labels, crop.sizes(images.sizes), train.batch_size, crop, config.seed)
    if train.sampling == "shuffled":
        if train.batch_size > len(images):
            raise UserError(
                f"config.train.batch_size is {train.batch_size}, but there are {len(images)} "
                f"training images; set --config.train.batch_size={len(images)} or less"
            )
        return ShuffledPlans(*common)
    if train.sampling == "tuples":
        return _tuple_plans(config, images, common)
    samples = train.samples_per_class
    classes = train.batch_size // samples
    if classes > images.num_classes:
        raise UserError(
            f"config.train.batch_size is {train.batch_size}, {classes} classes with {samples} "
            f"images each, but there are {images.num_classes} training classes; "
            f"set --config.train.batch_size={images.num_classes * samples} or less"
        )
    kind = {"epoch_classes": EpochClassPlans, "drawn_classes": DrawnClassPlans}[train.sampling]
    return kind(*common, samples, train.repeat_images)


def _tuple_plans(config: ConfigDict, images: Dataset, common: tuple[Any, ...]) -> TuplePlans:
    """The batches of tuples, from the pairs of the images that are trained on."""
    train, fields = config.train, config.train.tuples
    if images.pairs is None:
        raise UserError(
            f"config.train.sampling is tuples, which need pairs of images, and {config.data.name} "
            "lists none; choose another one, or data.name=sfm120k or scenes"
        )
    indices = np.full(len(images.records), -1)
    indices[images.positions] = np.arange(len(images))
    pairs = indices[images.pairs]
    pairs = pairs[(pairs >= 0).all(axis=1)]
    if not len(pairs):
        raise UserError(
            f"{config.data.name} lists no pair of two images that are trained on in this copy; "
            "hold out fewer classes (data.validation_classes), or prepare a larger copy"
        )
    plans = TuplePlans(
        *common,
        pairs=pairs,
        tuples=min(fields.pairs, len(pairs)),
        negatives=fields.negatives,
        pool_size=min(fields.pool, len(images)),
    )
    if not plans.batches_per_epoch:
        raise UserError(
            f"config.train.batch_size is {train.batch_size}, which is more than the {plans.tuples} "
            f"tuples of {plans.tuple_size} images in an epoch; set "
            f"--config.train.batch_size={plans.tuples * plans.tuple_size} or less"
        )
    return plans


def circumstances(config: ConfigDict, splits: Splits) -> dict[str, str]:
    """What, apart from the configuration, may not change while a run is interrupted."""
    return {"images": splits.fingerprint, "precision": compute_dtype(config.model.precision).name}


def shared_fields(config: ConfigDict) -> dict[str, Any]:
    """Fields that must be equal in all processes of a run, with their values."""
    local = ("run.data_dir", "run.cache", "run.workers", "run.wandb", "data.path", "run.input")
    shared = {f"config.{n}": v for n, v in flatten(config).items() if not n.startswith(local)}
    cache = config.run.cache
    return shared | {"config.run.cache": cache if cache == "device" else "none or host"}


def _views(config: ConfigDict) -> str:
    """What the model sees in training and in tests, in words."""
    train, test = config.data.train_view, config.data.test_view
    train = test if config.train.cached_features else train
    scales = ", ".join(f"{scale:g}" for scale in config.eval.scales)
    at = "" if scales == "1" else f" at scales {scales}"
    return f"{train} in training, {test}{at} in tests"


def describe(setup: Setup, parameters: int) -> None:
    """Prints what is trained on what.

    Args:
        setup: The run.
        parameters: Number of parameters, frozen ones included.
    """
    splits, plans, mesh = setup.splits, setup.plans, setup.learner.mesh
    named = {"train": splits.train, "validation": splits.validation, "test": splits.test}
    named["gallery"] = splits.gallery
    parts = [f"{name}: {part.describe()}" for name, part in named.items() if part]
    devices = mesh.devices.flat[0].device_kind
    if mesh.size > 1:
        devices = f"{mesh.size} devices ({devices})"
    console.say(f"{parameters:,} parameters on {devices}; " + "; ".join(parts))
    console.say(f"batches in an epoch: {plans.batches_per_epoch}; views: {_views(setup.config)}")
    if isinstance(plans, TuplePlans):
        console.say(
            f"{plans.tuples} of {len(plans.pairs)} pairs in an epoch, each with "
            f"{plans.negatives} negatives mined among {plans.pool_size} images"
        )
    if isinstance(plans, ClassPlans):
        small = int(np.sum(np.bincount(plans.labels) < plans.samples_per_class))
        if small:
            console.say(
                f"{small} of {splits.train.num_classes} training classes have fewer than "
                f"{plans.samples_per_class} images; some of their images repeat within a batch"
            )
