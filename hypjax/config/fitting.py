"""Fields that a configuration leaves open, fitted to the run's images or features."""

import math

import numpy as np
from jaxtyping import Int
from ml_collections import ConfigDict

from hypjax.config.choices import freezes_encoder, is_captioned
from hypjax.config.identity import flatten
from hypjax.config.rules import (
    FITTED_TO_FEATURES,
    FITTED_TO_IMAGES,
    FITTED_TO_TEXTS,
    refuse,
    validate_relations,
)
from hypjax.data import photos
from hypjax.data.captions import captioned_features
from hypjax.data.sentences import sentence_encoder
from hypjax.errors import UserError
from hypjax.models.encoder import FEATURES
from hypjax.system import console

_BATCH_SIZE = 64  # Images in a batch, if there are enough.
_CACHED_BATCH_SIZE = 256  # Cached features cost little, and heads learn more from more classes.
_USUAL_SAMPLES = 4  # Images per class in a batch, if there are enough of both.
_SHOWN_IMAGES = 64_000  # Images that training shows, with repetitions: minutes on two cores.
# Passes over the images if the head starts from principal components: for the head only, whose
# steps are cheap, or also for trained blocks, which learn faster. With more passes, recall of
# held-out classes of Cars-196 falls again.
_HEAD_PASSES, _PASSES = 25, 4
_TOWER_PASSES = 10  # Of pretrained towers of images and texts.
_MIN_HEAD_STEPS = 200  # With few classes, 25 passes are too few steps; see docs/own-images.md.


def fit_to_features(config: ConfigDict) -> ConfigDict:
    """Sets unset sizes of the model, in a copy of the configuration, to the features' dimension."""
    fields, data = flatten(config), config.data
    dims: dict[str, int | None] = {}
    if data.name == FEATURES and any(fields[name] is None for name in FITTED_TO_FEATURES):
        vectors = photos.read_vectors(data.path, data.labels).vectors
        assert vectors is not None
        dims = dict.fromkeys(FITTED_TO_FEATURES, vectors.shape[1])
    if fields[FITTED_TO_TEXTS] is None:
        dims[FITTED_TO_TEXTS] = _text_dim(config)
    unset = {name: dim for name, dim in dims.items() if fields[name] is None}
    if not unset:
        return config
    config = config.copy_and_resolve_references()
    config.update_from_flattened_dict(unset)
    validate_relations(config)
    return config


def _text_dim(config: ConfigDict) -> int:
    """The dimension of the captions' vectors, in a file of features or by a sentence encoder."""
    data, encoder = config.data, config.model.text.encoder
    vectors = None
    if data.name == FEATURES:
        vectors = captioned_features(data.path, data.labels).caption_vectors
    if vectors is None and encoder is not None:
        return sentence_encoder(encoder).features(["a"]).shape[1]
    if vectors is None:
        advice = "name an encoder of texts by --config.model.text.encoder"
        raise UserError(f"{data.path} has texts, but no text_features; {advice}")
    return len(next(iter(vectors.values())))


def fit_to_images(
    config: ConfigDict, labels: Int[np.ndarray, " rows"], num_images: int
) -> ConfigDict:
    """Returns the configuration with its None fields set to suit the training images' classes.

    Rows may be boxes of the images, too.
    """
    unset = [name for name in FITTED_TO_IMAGES if flatten(config)[name] is None]
    if not unset:
        return config
    config = config.copy_and_resolve_references()
    train = config.train
    class_sizes = np.ones(len(labels), int) if train.unlabelled else np.bincount(labels)
    usual_batch_size = _CACHED_BATCH_SIZE if train.cached_features else _BATCH_SIZE
    if train.samples_per_class is None:
        train.samples_per_class = _fit_samples(class_sizes, train.batch_size, usual_batch_size)
    if train.batch_size is None and train.sampling == "shuffled":
        train.batch_size = min(usual_batch_size, len(labels))
    if train.batch_size is None and train.sampling == "boxes":  # Rows are boxes, too.
        train.batch_size = min(usual_batch_size, 2 * num_images)
    if train.batch_size is None:
        num_classes = min(len(class_sizes), max(usual_batch_size // train.samples_per_class, 2))
        train.batch_size = num_classes * train.samples_per_class
    if train.total_steps is None:
        is_boxed = train.sampling == "boxes"  # Half a batch are images.
        train.total_steps = _fit_steps(config, 2 * num_images if is_boxed else len(labels))
    if config.optim.warmup_steps is None:
        config.optim.warmup_steps = train.total_steps // 10
    chosen = ", ".join(f"{name}={flatten(config)[name]}" for name in unset)
    console.say(f"chosen for these images: {chosen}")
    return config


def _fit_steps(config: ConfigDict, num_images: int) -> int:
    batch_size = config.train.batch_size
    if is_captioned(config.objective.name) and config.model.text.kind != FEATURES:
        return math.ceil(_TOWER_PASSES * num_images / batch_size)
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
