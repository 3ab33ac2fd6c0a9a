"""Validation of configurations: the type and range of each field, and rules between fields."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from ml_collections import ConfigDict

from hypjax.config import choices
from hypjax.config.choices import CUSTOM, GROUPED, IN_MEMORY
from hypjax.config.defaults import HYP_VIT, fields_of
from hypjax.config.identity import flatten
from hypjax.errors import UserError, nearest
from hypjax.geometry import SPACES
from hypjax.geometry.learned import has_curvature
from hypjax.geometry.registry import has_parts, is_product, named_parts
from hypjax.models.architectures import ARCHITECTURES, UNSIZED, is_transformer, supported
from hypjax.models.custom import CUSTOM_ENCODERS, SIZES
from hypjax.models.encoder import FEATURES
from hypjax.objectives import OBJECTIVES
from hypjax.objectives.create import declaration
from hypjax.objectives.matryoshka import trained_prefixes

# Fields that may be None: they are fitted to the user's own images, or to the features' dimension.
FITTED_TO_IMAGES = (
    "train.samples_per_class",
    "train.batch_size",
    "train.total_steps",
    "optim.warmup_steps",
)
FITTED_TO_FEATURES = ("model.head_dim", "model.width")
FITTED_TO_TEXTS = "model.text.width"
FITTED = frozenset((*FITTED_TO_IMAGES, *FITTED_TO_FEATURES, FITTED_TO_TEXTS))


def validate(config: ConfigDict) -> None:
    """Validates a configuration before anything is compiled; errors name the field.

    Fields of an unknown loss are not validated: searching with a saved run does not need the code
    of its loss.
    """
    fields = flatten(config)
    objective = fields.get("objective.name", HYP_VIT)
    if not isinstance(objective, str):  # The configuration was read from a damaged file.
        refuse_objective(objective)
    known = fields_of(objective)
    if objective not in OBJECTIVES:
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
    """Validates rules between fields; called again once sizes have been fitted to the images."""
    fields, declarations = flatten(config), fields_of(config.objective.name)
    for field, condition, holds in _DEFAULT_UNLESS:
        default = declarations[field].default
        if fields[field] != default and not holds(config):
            refuse(field, fields[field], f"{default} unless {condition}")
    for rules in _RULES:
        for is_broken, field, rule in rules(config):
            if is_broken:
                refuse(field, fields[field], rule)


# Conditions that several fields share, each in words and as a function.
_GROUPED = f"train.sampling is {' or '.join(GROUPED)}", lambda c: c.train.sampling in GROUPED
_UNCACHED = "train.cached_features is unset", lambda c: not c.train.cached_features
_AREA_CROP = "data.train_view is area_crop", lambda c: c.data.train_view == "area_crop"
_GEM = (
    "model.pooling and model.eval_pooling are gem",
    lambda c: c.model.pooling == c.model.eval_pooling == "gem",
)
_CURVED = (
    "objective.space has a curvature",
    lambda c: any(has_curvature(SPACES[name]) for name in named_parts(c.objective)),
)
_PARTS = "objective.space is product or fused", lambda c: has_parts(c.objective.space)
_CAPTIONED = "objective.name is captions", lambda c: choices.is_captioned(c.objective.name)
_HEAD = "model.head is set", lambda c: c.model.head != "none"
_UNSIZED = f"it is {' or '.join(UNSIZED)}", lambda c: c.model.architecture in UNSIZED
_TRANSFORMER = "it is a Transformer", lambda c: is_transformer(c.model.architecture)
_TRAINED = "the encoder is trained", lambda c: not choices.freezes_encoder(c.optim.frozen)
_NO_TEXT_ENCODER = (
    "there is no encoder of texts, whose parameters it leaves alone",
    lambda c: c.model.text.kind == FEATURES or c.model.text.width == 0,
)


def _has_head_or_texts(config: ConfigDict) -> bool:
    return config.model.head != "none" or config.model.text.width != 0


# Fields that must have their default unless a condition holds.
_DEFAULT_UNLESS: tuple[tuple[str, str, Callable[[ConfigDict], Any]], ...] = (
    ("data.blur", *_UNCACHED),
    ("data.colour_jitter", *_UNCACHED),
    ("data.grey", "data.channels is 3", lambda c: c.data.channels == 3),
    ("data.grey", *_UNCACHED),
    ("data.captions", *_CAPTIONED),
    ("data.exclude", "data.name is folder", lambda c: c.data.name == "folder"),
    ("data.labels", "data.name is features", lambda c: c.data.name == FEATURES),
    ("data.path", "data.name is folder or features", lambda c: c.data.name in ("folder", FEATURES)),
    ("data.skip_corrupt", "data.name is folder", lambda c: c.data.name in ("folder", IN_MEMORY)),
    ("data.split", "data.name is folder or features", lambda c: c.data.name in choices.USERS),
    ("data.stored_side", "run.cache is device", lambda c: c.run.cache == "device"),
    ("data.stored_side", *_AREA_CROP),
    ("eval.expansion_alpha", "eval.expansion is set", lambda c: c.eval.expansion),
    ("eval.scales", "data.name is not features", lambda c: c.data.name != FEATURES),
    ("eval.whiten", "eval.pca.head or eval.pca.encoder is set", lambda c: any(c.eval.pca.values())),
    ("model.drop_path", *_TRANSFORMER),
    ("model.drop_path", *_UNCACHED),
    ("model.gem_exponent", *_GEM),
    ("model.learn_gem", *_GEM),
    ("model.learn_gem", *_TRAINED),
    ("model.learn_gem", "train.lora_rank is 0", lambda c: c.train.lora_rank == 0),
    ("model.head_init", "model.head is dense", lambda c: c.model.head == "dense"),
    ("model.head_init", "model.load_head is unset", lambda c: not c.model.load_head),
    ("model.load_head", "model.weights is set", lambda c: c.model.weights),
    ("model.load_head", "the model has a head or a tower of texts", _has_head_or_texts),
    ("model.activation", *_TRANSFORMER),
    ("model.mlp_ratio", *_UNSIZED),
    ("model.norm_eps", *_TRANSFORMER),
    ("model.pool_first", *_TRANSFORMER),
    ("model.residual", *_TRANSFORMER),
    ("model.text.encoder", "model.text.kind is features", lambda c: c.model.text.kind == FEATURES),
    ("model.text.max_norm", *_CAPTIONED),
    ("optim.layer_decay", *_NO_TEXT_ENCODER),
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
    ("train.head_warmup_steps", *_NO_TEXT_ENCODER),
    ("train.patience", "eval.every is set", lambda c: c.eval.every),
    ("train.unlabelled", *_UNCACHED),
    ("train.unlabelled", *_GROUPED),
)

# Whether a rule is broken (if truthy), the field to change, and what its value must be. Each rule
# may assume that the rules before it hold.
Rules = Iterator[tuple[Any, str, str]]


def _fitting_rules(config: ConfigDict) -> Rules:
    fields = flatten(config)
    for field in FITTED_TO_FEATURES:
        is_unset = fields[field] is None and fields["data.name"] != FEATURES
        yield is_unset, field, f"a whole number, unless data.name is {FEATURES}"
    names = " or ".join(choices.USERS)
    rule = f"a whole number, unless data.name is {names}, or train.cached_features is set"
    can_be_fitted = fields["data.name"] in choices.USERS or fields["train.cached_features"]
    for field in FITTED_TO_IMAGES:
        yield fields[field] is None and not can_be_fitted, field, rule


def _batch_rules(config: ConfigDict) -> Rules:
    train, objective, fields = config.train, declaration(config.objective.name), flatten(config)
    rule = "tuples: this objective compares their images"
    yield objective.by_tuple and train.sampling != "tuples", "train.sampling", rule
    rule = f"{' or '.join(GROUPED)}: this objective compares images of one class"
    yield objective.by_class and train.sampling not in GROUPED, "train.sampling", rule
    is_boxed = train.sampling == "boxes"
    rule = "another unless objective.name is captions"
    yield is_boxed and not choices.is_captioned(config.objective.name), "train.sampling", rule
    if any(fields[field] is None for field in FITTED):
        return  # The rest is checked once the fields have been fitted to the images.
    tuple_size, samples = 2 + train.tuples.negatives, train.samples_per_class
    rule = f"a multiple of {tuple_size}, the images of a tuple (2 more than train.tuples.negatives)"
    yield train.sampling == "tuples" and train.batch_size % tuple_size, "train.batch_size", rule
    is_wrong = train.batch_size % samples or train.batch_size < 2 * samples
    rule = f"a multiple of train.samples_per_class ({samples}), and at least {2 * samples}"
    yield train.sampling in GROUPED and is_wrong, "train.batch_size", rule
    rule = "even, and at least 4: its second half are boxes of the first"
    is_wrong = train.batch_size % 2 or train.batch_size < 4
    yield is_boxed and is_wrong, "train.batch_size", rule
    needs_proxies = fields.get("objective.hyphc_leaves") == "proxies"
    rule = "images, unless the loss has proxies"
    yield needs_proxies and "objective.proxy_rate" not in fields, "objective.hyphc_leaves", rule
    if neighbors := config.objective.get("hier_neighbors"):  # Otherwise all points are neighbours.
        for field in ("objective.hier_proxies", "train.batch_size"):
            yield fields[field] <= neighbors, field, f"above objective.hier_neighbors ({neighbors})"
    rule = f"at most train.total_steps ({train.total_steps})"
    yield config.optim.warmup_steps > train.total_steps, "optim.warmup_steps", rule
    rule = f"below train.total_steps ({train.total_steps})"
    yield 0 < train.head_warmup_steps >= train.total_steps, "train.head_warmup_steps", rule


def _model_rules(config: ConfigDict) -> Rules:
    model = config.model
    is_wrong = (model.architecture == FEATURES) != (config.data.name == FEATURES)
    yield is_wrong, "model.architecture", "features if data.name is features, and nowhere else"
    if model.architecture not in (FEATURES, *UNSIZED, *ARCHITECTURES, *CUSTOM_ENCODERS):
        rule = f"{supported(model.architecture)}, or vit with sizes of your own"
        if model.architecture.startswith(CUSTOM):
            rule = "known in this process: pass encoder=, or call hypjax.register_encoder first"
        yield True, "model.architecture", rule
    for name in SIZES:
        if model.architecture in UNSIZED:
            rule = f"at least 1 if model.architecture is {model.architecture}"
            yield model[name] == 0, f"model.{name}", rule
        elif model.architecture != FEATURES or name != "width":
            rule = "0 if model.architecture has sizes of its own"
            yield model[name] != 0, f"model.{name}", rule
    rule = f"a multiple of model.num_heads ({model.num_heads})"
    is_wrong = model.architecture in UNSIZED and model.width % model.num_heads
    yield is_wrong, "model.width", rule
    text, is_captioned = model.text, choices.is_captioned(config.objective.name)
    is_wrong = text.kind == FEATURES and not is_captioned
    yield is_wrong, "model.text.kind", "clip or siglip unless objective.name is captions"
    rule = "above 0 if objective.name is captions; configs/captions.py sets it"
    yield is_captioned and text.width == 0, "model.text.width", rule
    rule = "st:NAME or onnx:FILE, unless data.name is features"
    is_missing = text.kind == FEATURES != config.data.name and text.encoder is None
    yield is_missing, "model.text.encoder", rule
    rule = f"a multiple of model.text.num_heads ({text.num_heads})"
    is_wrong = text.kind != FEATURES and (text.width is None or text.width % text.num_heads)
    yield is_wrong, "model.text.width", rule


def _part_rules(config: ConfigDict) -> Rules:
    fields, model = config.objective, config.model
    if not has_parts(fields.space):
        return
    count = len(fields.parts)
    yield not count, "objective.parts", f"two or more spaces if {_PARTS[0]}"
    is_wrong = fields.weights and len(fields.weights) != count
    yield is_wrong, "objective.weights", f"() or {count} numbers, one for each part"
    if is_product(fields.space) and model.head != "none" and model.head_dim:
        rule = f"a multiple of {count}, the parts of objective.space"
        yield model.head_dim % count, "model.head_dim", rule
    curved = sum(has_curvature(SPACES[name]) for name in fields.parts)
    is_wrong = fields.curvatures and len(fields.curvatures) != curved
    yield is_wrong, "objective.curvatures", f"{curved} numbers, one for each part with a curvature"


def _learned_scalar_rules(config: ConfigDict) -> Rules:
    fields, loss = config.objective, declaration(config.objective.name)
    if fields.curvatures:
        yield loss.one_ball, "objective.curvatures", f"() for {fields.name}, which has one ball"
    if fields.learn_c:
        low, high = fields.c_bounds
        is_outside = not all(low <= c <= high for c in fields.curvatures or [fields.c])
        rule = f"within objective.c_bounds ({low:g} to {high:g}) if objective.learn_c is set"
        yield is_outside, f"objective.{'curvatures' if fields.curvatures else 'c'}", rule
    space_fields = dataclasses.fields(SPACES[fields.space])
    learnable = [name for name, field in loss.fields.items() if field.learnable]
    learnable += [field.name for field in space_fields if field.metadata.get("learnable")]
    for name in fields.learn:
        yield name == "c", "objective.learn", "without c, whose curvature objective.learn_c learns"
        rule = f"any of {', '.join(learnable)}, each once," if learnable else "()"
        is_invalid = name not in learnable or fields.learn.count(name) > 1
        yield is_invalid, "objective.learn", f"{rule} for {fields.name}"
        yield not fields[name] > 0, f"objective.{name}", "above 0 if objective.learn names it"
    learned = [field.name for field in space_fields if field.name in fields.learn]
    if fields.learn_c:
        learned.append("c")
    if fields.get("memory") and learned:
        rule = f"0 if {learned[0]} is learned, since a memory holds points of earlier values"
        yield True, "objective.memory", rule


def _prefix_rules(config: ConfigDict) -> Rules:
    trained, dim = trained_prefixes(config.objective.to_dict()), config.model.head_dim
    for field, dims in (("objective.dims", trained), ("eval.prefixes", config.eval.prefixes)):
        is_too_long = dims and config.model.head != "none" and dim and max(dims) >= dim
        yield is_too_long, field, f"below model.head_dim ({dim}), which is added to them"
        rule = "None if prefixes of the head are scored"
        yield dims and config.eval.pca.head, "eval.pca.head", rule
    rule = f"0 for {config.objective.name}, since a memory holds points of one dimension"
    yield trained and config.objective.get("memory"), "objective.memory", rule


def _data_rules(config: ConfigDict) -> Rules:
    data, cache, name = config.data, config.run.cache, config.data.name
    rule = "images: a folder, a table, a dataset or hf://OWNER/NAME"
    yield name == "folder" and not data.path, "data.path", rule
    rule = "a .npz, .npy or .parquet file of features"
    yield name == FEATURES and not data.path, "data.path", rule
    rule = "below 1, a share of the training images, if data.split is images"
    yield data.split == "images" and data.validation_classes >= 1, "data.validation_classes", rule
    if data.train_view == "resize_crop" or data.test_view == "centre_crop":
        rule = f"at least data.image_size ({data.image_size})"
        yield data.resize < data.image_size, "data.resize", rule
    for field in ("mean", "std"):
        rule = f"one number per channel ({data.channels})"
        yield len(data[field]) != data.channels, f"data.{field}", rule
    rule = "none or host if train.cached_features is set"
    yield config.train.cached_features and cache == "device", "run.cache", rule
    rule = "None with a tower of texts, whose points would not be projected"
    yield config.eval.pca.head and config.model.text.width != 0, "eval.pca.head", rule
    dim, pca_dim = config.model.head_dim, config.eval.pca.head
    if config.model.head != "none" and dim and pca_dim:
        yield pca_dim > dim, "eval.pca.head", f"at most model.head_dim ({dim})"


def _training_rules(config: ConfigDict) -> Rules:
    train, is_frozen = config.train, choices.freezes_encoder(config.optim.frozen)
    rule = "set, and optim.frozen must name the encoder, if data.name is features"
    trains_head = is_frozen and train.cached_features
    yield config.data.name == FEATURES and not trains_head, "train.cached_features", rule
    rule = "dense, norm_dense or linear if optim.frozen names the encoder"
    yield is_frozen and config.model.head == "none", "model.head", rule
    has_no_effect = is_frozen and config.objective.get("structure_features") == "encoder"
    yield has_no_effect, "objective.structure_features", "head if optim.frozen names the encoder"
    frozen = [name for name in config.optim.frozen if name != "patch_projection"]
    rule = "False unless optim.frozen names the encoder, or its lowest layers"
    freezes_layers = any(map(choices.in_encoder, frozen))
    yield train.cached_features and not freezes_layers, "train.cached_features", rule


_RULES = (
    *(_fitting_rules, _batch_rules, _model_rules, _part_rules, _learned_scalar_rules),
    *(_prefix_rules, _data_rules, _training_rules),
)


def refuse_objective(name: Any) -> NoReturn:
    """Raises a `UserError` for an unknown objective; lists the known ones, except combinations."""
    losses = ", ".join(objective for objective in OBJECTIVES if "+" not in objective)
    rule = f"one of {losses}, or a combination such as hier+supcon{nearest(str(name), OBJECTIVES)}"
    refuse("objective.name", name, rule)


def refuse(field: str, value: Any, rule: str) -> NoReturn:
    """Raises a `UserError` for an invalid value."""
    raise UserError(f"config.{field} is {value!r:.200}; it must be {rule}")
