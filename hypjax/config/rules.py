"""Validation: the type and range of each field, and rules between fields."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from hypjax.config import choices
from hypjax.config.choices import CUSTOM
from hypjax.config.defaults import HYP_VIT, fields_of
from hypjax.config.identity import flatten
from hypjax.errors import UserError, nearest
from hypjax.geometry import SPACES
from hypjax.geometry.learned import has_curvature, initial_scalars
from hypjax.geometry.registry import has_parts, is_product, named_parts
from hypjax.models.architectures import ARCHITECTURES, is_transformer, supported
from hypjax.models.custom import CUSTOM_ENCODERS, SIZES
from hypjax.models.encoder import FEATURES
from hypjax.objectives import OBJECTIVES
from hypjax.objectives.base import GROUPED
from hypjax.objectives.create import BUILT_IN, create_objective, declaration
from hypjax.objectives.matryoshka import trained_prefixes

# Fields that may be None for the user's own data: fitted to its images, or to features' sizes.
FITTED_TO_IMAGES = ("train.samples_per_class", "train.batch_size", "train.total_steps")
FITTED_TO_IMAGES += ("optim.warmup_steps",)
FITTED_TO_FEATURES = ("model.head_dim", "model.width")
FITTED = frozenset(FITTED_TO_IMAGES + FITTED_TO_FEATURES)
_FROM_PATHS, _CROP = ("folder", FEATURES), "area_crop"
_WITH_IMAGES = ("folder", choices.IN_MEMORY)


def validate(config: ConfigDict) -> None:
    """Validates a configuration before anything is compiled; an error names the field.

    Fields of an unknown loss are not validated: to search with a saved run, its code is not needed.
    """
    fields = flatten(config)
    name = fields.get("objective.name", HYP_VIT)
    if not isinstance(name, str):  # Of a damaged file.
        refuse_objective(name)
    known = fields_of(name)
    if name not in OBJECTIVES:
        fields = {f: x for f, x in fields.items() if f in known or not f.startswith("objective.")}
    for field in sorted(fields.keys() - known.keys()):
        raise UserError(f"unknown field config.{field}{nearest(field, known)}")
    for field in sorted(known.keys() - fields.keys()):
        raise UserError(f"config.{field} is missing; start from hypjax.config.default_config()")
    for field, value in fields.items():
        if rule := known[field].requirement(value):
            refuse(field, value, rule)
    validate_relations(config)


def validate_relations(config: ConfigDict) -> None:
    """Validates rules between fields; again after sizes have been fitted to the images."""
    fields, declared = flatten(config), fields_of(config.objective.name)
    for field, rule, holds in _DEFAULT_UNLESS:
        default = declared[field].default
        if fields[field] != default and not holds(config):
            refuse(field, fields[field], f"{default} unless {rule}")
    of_model = _of_model, _of_parts, _of_learned_scalars, _of_prefixes
    for relations in (_of_batches, *of_model, _of_data, _of_training):
        for broken, field, rule in relations(config):
            if broken:
                refuse(field, fields[field], rule)


_OF_CLASSES = f"train.sampling is {' or '.join(GROUPED)}"
# Conditions of several fields, each with its test.
_CROPPED = "train.cached_features is unset", lambda c: not c.train.cached_features
_GEM = (
    "model.pooling and model.eval_pooling are gem",
    lambda c: c.model.pooling == c.model.eval_pooling == "gem",
)
_CURVED = (
    "objective.space has a curvature",
    lambda c: any(has_curvature(SPACES[name]) for name in named_parts(c.objective)),
)
_PARTS = "objective.space is product or fused", lambda c: has_parts(c.objective.space)
_HEAD = "model.head is set", lambda c: c.model.head != "none"
_TRAINED = "the encoder is trained", lambda c: not choices.freezes_encoder(c.optim.frozen)
# Fields that must have their default unless a condition holds.
_DEFAULT_UNLESS: tuple[tuple[str, str, Callable[[ConfigDict], Any]], ...] = (
    ("data.blur", *_CROPPED),
    ("data.colour_jitter", *_CROPPED),
    ("data.grey", "data.channels is 3", lambda c: c.data.channels == 3),
    ("data.grey", *_CROPPED),
    ("data.labels", "data.name is features", lambda c: c.data.name == FEATURES),
    ("data.path", "data.name is folder or features", lambda c: c.data.name in _FROM_PATHS),
    ("data.skip_corrupt", "data.name is folder", lambda c: c.data.name in _WITH_IMAGES),
    ("data.split", "data.name is folder or features", lambda c: c.data.name in choices.USERS),
    ("data.stored_side", "run.cache is device", lambda c: c.run.cache == "device"),
    ("data.stored_side", "data.train_view is area_crop", lambda c: c.data.train_view == _CROP),
    ("eval.expansion_alpha", "eval.expansion is set", lambda c: c.eval.expansion),
    ("eval.scales", "data.name is not features", lambda c: c.data.name != FEATURES),
    ("eval.whiten", "eval.pca.head or eval.pca.encoder is set", lambda c: any(c.eval.pca.values())),
    ("model.drop_path", "it is a Transformer", lambda c: is_transformer(c.model.architecture)),
    ("model.drop_path", *_CROPPED),
    ("model.gem_exponent", *_GEM),
    ("model.learn_gem", *_GEM),
    ("model.learn_gem", *_TRAINED),
    ("model.learn_gem", "train.lora_rank is 0", lambda c: c.train.lora_rank == 0),
    ("model.head_init", "model.head is dense", lambda c: c.model.head == "dense"),
    ("model.head_init", "model.load_head is unset", lambda c: not c.model.load_head),
    ("model.load_head", "model.weights is set", lambda c: c.model.weights),
    ("model.load_head", *_HEAD),
    ("objective.curvatures", *_CURVED),
    ("objective.learn_c", *_CURVED),
    ("objective.max_distance", *_CURVED),
    ("objective.parts", *_PARTS),
    ("objective.weights", *_PARTS),
    ("objective.summed", "objective.space is product", lambda c: is_product(c.objective.space)),
    ("run.cache", "data.decoder is exact", lambda c: c.data.decoder == "exact"),
    ("train.lora_rank", *_TRAINED),
    ("train.head_warmup_steps", *_TRAINED),
    ("train.head_warmup_steps", *_HEAD),
    ("train.unlabelled", *_CROPPED),
    ("train.unlabelled", _OF_CLASSES, lambda c: c.train.sampling in GROUPED),
)

# Further rules yield whether a rule is broken, the field to change, and what it must be. Each may
# rely on the rules before it.
Relations = Iterator[tuple[Any, str, str]]


def _of_batches(config: ConfigDict) -> Relations:
    train, objective = config.train, declaration(config.objective.name)
    fields = flatten(config)
    for field in sorted(FITTED):
        size = field in FITTED_TO_FEATURES
        names = (FEATURES,) if size else choices.USERS
        fitted = config.data.name in names or (train.cached_features and not size)
        cached = "" if size else ", or train.cached_features is set"
        rule = f"a whole number, unless data.name is {' or '.join(names)}{cached}"
        yield fields[field] is None and not fitted, field, rule
    rule = "tuples: this objective compares their images"
    yield objective.by_tuple and train.sampling != "tuples", "train.sampling", rule
    rule = f"{' or '.join(GROUPED)}: this objective compares images of one class"
    yield objective.by_class and train.sampling not in GROUPED, "train.sampling", rule
    if any(fields[field] is None for field in FITTED):
        return  # They are fitted to the images later.
    size, samples = 2 + train.tuples.negatives, train.samples_per_class
    rule = f"a multiple of {size}, the images of a tuple (2 more than train.tuples.negatives)"
    yield train.sampling == "tuples" and train.batch_size % size, "train.batch_size", rule
    uneven = train.batch_size % samples or train.batch_size < 2 * samples
    rule = f"a multiple of train.samples_per_class ({samples}), and at least {2 * samples}"
    yield train.sampling in GROUPED and uneven, "train.batch_size", rule
    proxies = fields.get("objective.hyphc_leaves") == "proxies"
    rule = "images, unless the loss has proxies"
    yield proxies and "objective.proxy_rate" not in fields, "objective.hyphc_leaves", rule
    if neighbors := config.objective.get("hier_neighbors"):  # Of fewer points, all are related.
        for field in ("objective.hier_proxies", "train.batch_size"):
            yield fields[field] <= neighbors, field, f"above objective.hier_neighbors ({neighbors})"
    rule = f"at most train.total_steps ({train.total_steps})"
    yield config.optim.warmup_steps > train.total_steps, "optim.warmup_steps", rule
    rule = f"below train.total_steps ({train.total_steps})"
    yield 0 < train.head_warmup_steps >= train.total_steps, "train.head_warmup_steps", rule


def _of_model(config: ConfigDict) -> Relations:
    model, field = config.model, "model.architecture"
    rule = "features if data.name is features, and nowhere else"
    yield (model.architecture == FEATURES) != (config.data.name == FEATURES), field, rule
    if model.architecture not in ("vit", FEATURES, *ARCHITECTURES, *CUSTOM_ENCODERS):
        rule = f"{supported(model.architecture)}, or vit with sizes of your own"
        if model.architecture.startswith(CUSTOM):
            rule = "known in this process: pass encoder=, or call hypjax.register_encoder first"
        yield True, field, rule
    for name in SIZES:
        if model.architecture == "vit":
            yield model[name] == 0, f"model.{name}", "at least 1 if model.architecture is vit"
        elif model.architecture != FEATURES or name != "width":
            rule = "0 if model.architecture has sizes of its own"
            yield model[name] != 0, f"model.{name}", rule
    rule = f"a multiple of model.num_heads ({model.num_heads})"
    yield model.architecture == "vit" and model.width % model.num_heads, "model.width", rule


def _of_parts(config: ConfigDict) -> Relations:
    fields, model = config.objective, config.model
    if not has_parts(fields.space):
        return
    count, curved = len(fields.parts), sum(has_curvature(SPACES[name]) for name in fields.parts)
    yield not count, "objective.parts", f"two or more spaces if {_PARTS[0]}"
    wrong = fields.weights and len(fields.weights) != count
    yield wrong, "objective.weights", f"() or {count} numbers, one for each part"
    shared = is_product(fields.space) and model.head != "none" and model.head_dim
    uneven = shared and model.head_dim % count
    yield uneven, "model.head_dim", f"a multiple of {count}, the parts of objective.space"
    wrong = fields.curvatures and len(fields.curvatures) != curved
    yield wrong, "objective.curvatures", f"{curved} numbers, one for each part with a curvature"


def _of_learned_scalars(config: ConfigDict) -> Relations:
    fields, of_loss = config.objective, declaration(config.objective.name).fields
    if fields.curvatures:
        one_ball = fields.name.endswith("hypmix") or fields.name.startswith(("hier+", "cones+"))
        yield one_ball, "objective.curvatures", f"() for {fields.name}, which has one ball"
    if fields.learn_c:
        low, high = fields.c_bounds
        outside = not all(low <= c <= high for c in fields.curvatures or [fields.c])
        rule = f"within objective.c_bounds ({low:g} to {high:g}) if objective.learn_c is set"
        yield outside, f"objective.{'curvatures' if fields.curvatures else 'c'}", rule
    of_space = dataclasses.fields(SPACES[fields.space])
    learnable = [name for name, field in of_loss.items() if field.learnable]
    learnable += [field.name for field in of_space if field.metadata.get("learnable")]
    for name in fields.learn:
        yield name == "c", "objective.learn", "without c, whose curvature objective.learn_c learns"
        rule = f"any of {', '.join(learnable)}, each once," if learnable else "()"
        unknown = name not in learnable or fields.learn.count(name) > 1
        yield unknown, "objective.learn", f"{rule} for {fields.name}"
        yield not fields[name] > 0, f"objective.{name}", "above 0 if objective.learn names it"
    moving = [field.name for field in of_space if field.name in fields.learn]
    if fields.get("memory") and (fields.learn_c or moving):
        rule = f"0 if {(*moving, 'c')[0]} is learned, since a memory holds points of earlier ones"
        yield True, "objective.memory", rule
    if fields.name in OBJECTIVES.keys() - BUILT_IN and (fields.learn_c or fields.learn):
        # A user's objective must be scored in its saved space, with the scalars that it learns:
        # only the objective itself shows whether it is.
        objective, initial = create_objective(config), initial_scalars(fields)
        space, doubled = objective.score_space, {n: 2 * np.array(x) for n, x in initial.items()}
        moved = objective.with_scalars(doubled).score_space != space.with_scalars(doubled)
        moved |= objective.with_scalars(initial).score_space != space
        name, value = ("learn_c", False) if fields.learn_c else ("learn", ())
        rule = f"{value} for {fields.name.removeprefix(CUSTOM)}, whose scores are in another space"
        yield moved, f"objective.{name}", rule


def _of_prefixes(config: ConfigDict) -> Relations:
    trained, dim = trained_prefixes(config), config.model.head_dim
    for field, dims in (("objective.dims", trained), ("eval.prefixes", config.eval.prefixes)):
        long = dims and config.model.head != "none" and dim and max(dims) >= dim
        yield long, field, f"below model.head_dim ({dim}), which is added to them"
        rule = "None if prefixes of the head are scored"
        yield dims and config.eval.pca.head, "eval.pca.head", rule
    rule = f"0 for {config.objective.name}, since a memory holds points of one dimension"
    yield trained and config.objective.get("memory"), "objective.memory", rule


def _of_data(config: ConfigDict) -> Relations:
    data, cache, name = config.data, config.run.cache, config.data.name
    rule = "images: a folder, a table, a dataset or hf://OWNER/NAME"
    yield name == "folder" and not data.path, "data.path", rule
    rule = "a .npz, .npy or .parquet file of features"
    yield name == FEATURES and not data.path, "data.path", rule
    rule = "below 1, a share of the training images, if data.split is images"
    counted = data.split == "images" and data.validation_classes >= 1
    yield counted, "data.validation_classes", rule
    crops = data.train_view == "resize_crop" or data.test_view == "centre_crop"
    rule = f"at least data.image_size ({data.image_size})"
    yield crops and data.resize < data.image_size, "data.resize", rule
    for field in ("mean", "std"):
        rule = f"one number per channel ({data.channels})"
        yield len(data[field]) != data.channels, f"data.{field}", rule
    rule = "none or host if train.cached_features is set"
    yield config.train.cached_features and cache == "device", "run.cache", rule
    dim = config.model.head != "none" and config.model.head_dim
    large = dim and (config.eval.pca.head or 0) > dim
    yield large, "eval.pca.head", f"at most model.head_dim ({dim})"


def _of_training(config: ConfigDict) -> Relations:
    train, frozen = config.train, choices.freezes_encoder(config.optim.frozen)
    rule = "set, and optim.frozen must name the encoder, if data.name is features"
    trained = not (frozen and train.cached_features)
    yield config.data.name == FEATURES and trained, "train.cached_features", rule
    rule = "another one if optim.frozen names the encoder"
    yield frozen and config.model.head == "none", "model.head", rule
    unmoved = frozen and config.objective.get("structure_features") == "encoder"
    yield unmoved, "objective.structure_features", "head if optim.frozen names the encoder"
    blocks = [name for name in config.optim.frozen if name != "patch_projection"]
    rule = "False unless optim.frozen names the encoder, or its lowest layers"
    moving = train.cached_features and not any(map(choices.in_encoder, blocks))
    yield moving, "train.cached_features", rule


def refuse_objective(name: Any) -> None:
    """Raises a `UserError` for an unknown objective; it lists those without a prefix."""
    plain = ", ".join(objective for objective in OBJECTIVES if "+" not in objective)
    rule = f"one of {plain}, or a combination such as hier+supcon{nearest(str(name), OBJECTIVES)}"
    refuse("objective.name", name, rule)


def refuse(field: str, value: Any, rule: str) -> None:
    """Raises a `UserError` for an invalid value."""
    raise UserError(f"config.{field} is {value!r:.200}; it must be {rule}")
