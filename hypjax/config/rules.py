"""Validation: the type and range of each field, and rules between fields."""

import dataclasses
import functools
import itertools
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from flax.traverse_util import flatten_dict
from ml_collections import ConfigDict, FieldReference

from hypjax.config import choices
from hypjax.config.choices import OWN
from hypjax.config.defaults import (
    HYP_VIT,
    STEPS,
    declared_fields,
    objective_defaults,
    shared_defaults,
)
from hypjax.config.identity import flatten
from hypjax.errors import UserError, nearest
from hypjax.fields import ABOVE_0, Field, Rule, at_least, each, or_none, range_within, within
from hypjax.geometry import SPACES
from hypjax.geometry.learned import has_curvature, learned_numbers
from hypjax.geometry.registry import named_parts, simple_spaces
from hypjax.models.architectures import ARCHITECTURES, is_transformer, supported
from hypjax.models.encoder import FEATURES
from hypjax.models.own import ENCODERS
from hypjax.objectives import OBJECTIVES
from hypjax.objectives.base import GROUPED
from hypjax.objectives.create import BUILT_IN, create_objective, declaration
from hypjax.objectives.matryoshka import trained_prefixes

# Fields that may be None for the user's own data, which they then fit; the sizes only for features.
_FITTED_SIZES = ("model.head_dim", "model.width")
FITTED = frozenset(f"train.{name}" for name in ("batch_size", "samples_per_class", "total_steps"))
FITTED |= {"optim.warmup_steps", *_FITTED_SIZES}
# Types of the items of lists that are empty by default; others hold strings.
_ITEMS = {"eval.prefixes": int, "objective.curvatures": float}
_SCALARS = {
    int: Rule(lambda value: type(value) is int, "a whole number"),
    float: Rule(
        lambda value: type(value) in (int, float) and abs(value) <= sys.float_info.max,
        "a finite number",
    ),
    str: Rule(lambda value: isinstance(value, str), "a string"),
    bool: Rule(lambda value: type(value) is bool, "True or False"),
}


def _is_group(value: Any) -> bool:
    if not (isinstance(value, tuple) and len(value) == 4):
        return False
    (name, rate, decay, start), number = value, _SCALARS[float]
    return (
        choices.names_parameters(name)
        and (number.holds(rate) and rate >= 0)
        and (decay is None or (number.holds(decay) and decay >= 0))
        and (type(start) is int and 0 <= start <= STEPS)
    )


def field_types(objective: str) -> Mapping[str, Rule]:
    """The rule, for each field of an objective's runs, that a value has the type of the default."""
    return {**_shared_types(), **_types("objective.", objective_defaults(objective))}


@functools.cache
def _shared_types() -> Mapping[str, Rule]:
    """The types of the fields of all runs: an objective's own fields are not among them."""
    return _types("", shared_defaults())


def _types(prefix: str, defaults: ConfigDict) -> dict[str, Rule]:
    rules, groups = {}, [(prefix, defaults)]
    for prefix, group in groups:
        for name, default in group.items(preserve_field_references=True):
            if isinstance(default, ConfigDict):
                groups.append((f"{prefix}{name}.", default))
            else:
                rules[prefix + name] = _type(prefix + name, default)
    return rules


def _type(field: str, default: Any) -> Rule:
    if field == "optim.groups":
        return Rule(
            lambda value: isinstance(value, tuple) and all(map(_is_group, value)),
            "a list of (parameters, factor of the rate, decay or None, first step)",
        )
    if isinstance(default, FieldReference):
        return or_none(_SCALARS[default.get_type()])
    if isinstance(default, tuple):
        scalar = _SCALARS[type(default[0]) if default else _ITEMS.get(field, str)]
        return Rule(
            lambda value: isinstance(value, tuple) and all(map(scalar.holds, value)),
            f"a list whose items are each {scalar.words}",
        )
    return _SCALARS[type(default)]


_CURVATURES = 1e-12, 1e6  # Within which c is learned; a ball of a smaller one is not searched.

_SIZES = ("patch_size", "width", "depth", "num_heads")  # Of an encoder.
_DECLARED = flatten_dict(
    {name: group.to_dict() for name, group in declared_fields().items()}, sep="."
)
_RULES = {name: own.rule for name, own in _DECLARED.items() if isinstance(own, Field)} | {
    "seed": within(0, 2**32 - 1),  # JAX's keys drop further bits.
    "objective.space": Rule(
        lambda value: value in SPACES,
        f"one of {', '.join(SPACES)}, or a space that hypjax.register_space names in this process",
    ),
    "objective.c": at_least(0),
    "objective.clip_radius": or_none(ABOVE_0),
    "objective.feature_scale": ABOVE_0,
    "objective.c_bounds": range_within(*_CURVATURES),
    "objective.c_rate": at_least(0),
    "objective.curvatures": each(
        within(0, _CURVATURES[1]).holds,
        f"at most 100 numbers, each at least 0 and up to {_CURVATURES[1]:g}",
        most=100,
    ),
}


def validate(config: ConfigDict) -> None:
    """Validates a configuration before anything is compiled; an error names the field.

    A loss whose code is unknown, as the user's in a saved run may be, is not needed for searching:
    its own fields are not validated, and only `create_objective` refuses it.
    """
    fields = flatten(config)
    name = fields.get("objective.name", HYP_VIT)
    known = field_types(name)
    if name not in OBJECTIVES:
        fields = {f: v for f, v in fields.items() if f in known or not f.startswith("objective.")}
    for field in sorted(fields.keys() - known.keys()):
        raise UserError(f"unknown field config.{field}{nearest(field, known)}")
    for field in sorted(known.keys() - fields.keys()):
        raise UserError(f"config.{field} is missing; start from hypjax.config.default_config()")
    for field, value in fields.items():
        if not known[field].holds(value):
            refuse(field, value, known[field].words)
    own = {f"objective.{field}": own.rule for field, own in declaration(name).fields.items()}
    for field, rule in (_RULES | own).items():
        if not rule.holds(fields[field]):
            refuse(field, fields[field], rule.words)
    validate_relations(config)


def validate_relations(config: ConfigDict) -> None:
    """Validates the rules between fields, again once those are filled in that fit the images."""
    fields = flatten(config)
    for broken, field, words in itertools.chain(*(relations(config) for relations in _RELATIONS)):
        if broken:
            refuse(field, fields[field], words)


# Rules between fields: whether one is broken, the field to change, and what it must be. They are
# evaluated one by one, so that each may rely on those before it.
Relations = Iterator[tuple[Any, str, str]]


def _of_batches(config: ConfigDict) -> Relations:
    train, objective = config.train, declaration(config.objective.name)
    fields = flatten(config)
    for field in sorted(FITTED):
        size = field in _FITTED_SIZES
        names = ("features",) if size else choices.USERS
        fitted = config.data.name in names or (train.cached_features and not size)
        cached = "" if size else ", or train.cached_features is set"
        words = f"a whole number, unless data.name is {' or '.join(names)}{cached}"
        yield fields[field] is None and not fitted, field, words
    words = "tuples: this objective compares their images"
    yield objective.by_tuple and train.sampling != "tuples", "train.sampling", words
    words = "epoch_classes or drawn_classes: this objective compares images of one class"
    yield objective.by_class and train.sampling not in GROUPED, "train.sampling", words
    if any(fields[field] is None for field in FITTED):
        return  # What fits the images is known later.
    size, samples = 2 + train.tuples.negatives, train.samples_per_class
    words = f"a multiple of {size}, the images of a tuple (2 more than train.tuples.negatives)"
    yield train.sampling == "tuples" and train.batch_size % size, "train.batch_size", words
    uneven = train.batch_size % samples or train.batch_size < 2 * samples
    words = f"a multiple of train.samples_per_class ({samples}), and at least {2 * samples}"
    yield train.sampling in GROUPED and uneven, "train.batch_size", words
    if neighbors := config.objective.get("hier_neighbors"):  # With fewer points, all are related.
        for field in ("objective.hier_proxies", "train.batch_size"):
            words = f"above objective.hier_neighbors ({neighbors})"
            yield fields[field] <= neighbors, field, words
    words = f"at most train.total_steps ({train.total_steps})"
    yield config.optim.warmup_steps > train.total_steps, "optim.warmup_steps", words


def _of_model(config: ConfigDict) -> Relations:
    model, field = config.model, "model.architecture"
    words = "features if data.name is features, and nowhere else"
    yield (model.architecture == FEATURES) != (config.data.name == "features"), field, words
    if model.architecture not in ("vit", FEATURES, *ARCHITECTURES, *ENCODERS):
        words = f"{supported(model.architecture)}, or vit with sizes of your own"
        if model.architecture.startswith(OWN):
            words = (
                "known in this process: its code is not hypjax's, so pass the module as encoder= "
                "to hypjax.load, whose model embeds, saves galleries and searches, or to "
                "hypjax.train; or name it by hypjax.register_encoder"
            )
        yield True, field, words
    sizes = " ".join(f"--config.model.{size}=0" for size in _SIZES if model[size])
    for name in _SIZES:
        if model.architecture == "vit":
            yield model[name] == 0, f"model.{name}", "at least 1 if model.architecture is vit"
        elif model.architecture != FEATURES or name != "width":
            words = f"0 if an architecture with sizes of its own is named; add {sizes}"
            yield model[name] != 0, f"model.{name}", words
    if model.architecture == "vit":
        words = f"a multiple of model.num_heads ({model.num_heads})"
        yield model.width % model.num_heads, "model.width", words
    if model.drop_path:
        words = "0 unless the architecture is a Transformer"
        yield not is_transformer(model.architecture), "model.drop_path", words
        words = "0 if train.cached_features is set, since the encoder is not run in training"
        yield config.train.cached_features, "model.drop_path", words
    if model.load_head:
        yield not model.weights, "model.load_head", "False unless model.weights names a run"
        yield model.head == "none", "model.load_head", "False if model.head is none"
    if model.head_init == "pca":
        yield model.head != "dense", "model.head_init", "orthogonal unless model.head is dense"
        yield model.load_head, "model.head_init", "orthogonal if model.load_head is set"


def _of_space(config: ConfigDict) -> Relations:
    fields, model = config.objective, config.model
    product, count = fields.space == "product", len(fields.parts)
    suit = count >= 2 and set(fields.parts) <= {*simple_spaces()} if product else not count
    words = f"two or more of {', '.join(simple_spaces())} if objective.space is product, or else ()"
    yield not suit, "objective.parts", words
    uneven = product and model.head != "none" and model.head_dim and model.head_dim % count
    yield uneven, "model.head_dim", f"a multiple of {count}, the parts of objective.space"
    curved = sum(has_curvature(SPACES[name]) for name in named_parts(fields))
    wrong = product and fields.curvatures and len(fields.curvatures) != curved
    yield wrong, "objective.curvatures", f"{curved} numbers, one for each part with a curvature"
    flat = f"if objective.space is {fields.space}, which has no curvature"
    if fields.curvatures:
        yield not curved, "objective.curvatures", f"() {flat}"
        one = fields.name.endswith("hypmix") or fields.name.startswith(("hier+", "cones+"))
        yield one, "objective.curvatures", f"() for {fields.name}, which has one ball"
    if fields.learn_c:
        low, high = fields.c_bounds
        yield not curved, "objective.learn_c", f"False {flat}"
        outside = not all(low <= c <= high for c in fields.curvatures or [fields.c])
        words = f"within objective.c_bounds ({low:g} to {high:g}) if objective.learn_c is set"
        yield outside, f"objective.{'curvatures' if fields.curvatures else 'c'}", words


def _of_learned_scalars(config: ConfigDict) -> Relations:
    fields, of_loss = config.objective, declaration(config.objective.name).fields
    of_space = dataclasses.fields(SPACES[fields.space])
    learnable = [name for name, field in of_loss.items() if field.learnable]
    learnable += [field.name for field in of_space if field.metadata.get("learnable")]
    for name in fields.learn:
        words = "without c, whose curvature objective.learn_c learns"
        yield name == "c", "objective.learn", words
        known = f"any of {', '.join(learnable)}, each once," if learnable else "()"
        unknown = name not in learnable or fields.learn.count(name) > 1
        yield unknown, "objective.learn", f"{known} for {fields.name}"
        words = "above 0 if objective.learn names it"
        yield not fields[name] > 0, f"objective.{name}", words
    moving = [field.name for field in of_space if field.name in fields.learn]
    if fields.get("memory") and (fields.learn_c or moving):
        words = f"0 if {(*moving, 'c')[0]} is learned, since a memory holds points of earlier ones"
        yield True, "objective.memory", words
    if fields.name in OBJECTIVES.keys() - BUILT_IN and (fields.learn_c or fields.learn):
        # A user's objective is scored in the space that is saved, with the numbers that it learns.
        objective, first = create_objective(config), learned_numbers(fields)
        space, doubled = objective.score_space, {n: 2 * np.array(x) for n, x in first.items()}
        moved = objective.with_scalars(doubled).score_space != space.with_scalars(doubled)
        moved |= objective.with_scalars(first).score_space != space
        name, value = ("learn_c", False) if fields.learn_c else ("learn", ())
        words = f"{value} for {fields.name.removeprefix(OWN)}, whose scores are in another space"
        yield moved, f"objective.{name}", words


def _of_prefixes(config: ConfigDict) -> Relations:
    trained, dim = trained_prefixes(config), config.model.head_dim
    for field, dims in (("objective.dims", trained), ("eval.prefixes", config.eval.prefixes)):
        long = dims and config.model.head != "none" and dim and max(dims) >= dim
        yield long, field, f"below model.head_dim ({dim}), which is added to them"
        words = "None if prefixes of the head are scored"
        yield dims and config.eval.pca.head, "eval.pca.head", words
    words = f"0 for {config.objective.name}, since a memory holds points of one dimension"
    yield trained and config.objective.get("memory"), "objective.memory", words


def _of_data(config: ConfigDict) -> Relations:
    data, cache, name = config.data, config.run.cache, config.data.name
    words = "images: a folder, a table, a dataset or hf://OWNER/NAME"
    yield name == "folder" and not data.path, "data.path", words
    words = "a .npz, .npy or .parquet file of features"
    yield name == "features" and not data.path, "data.path", words
    words = f"None if data.name is {name}"
    yield name not in ("folder", "features") and data.path, "data.path", words
    words = "None unless data.name is features"
    yield name != "features" and data.labels, "data.labels", words
    if data.split == "images":
        words = "classes unless data.name is folder or features"
        yield name not in choices.USERS, "data.split", words
        words = "0 if data.split is images"
        yield data.validation_classes >= 1, "data.validation_classes", words
    crops = data.train_view == "resize_crop" or data.test_view == "centre_crop"
    words = f"at least data.image_size ({data.image_size})"
    yield crops and data.resize < data.image_size, "data.resize", words
    for field in ("mean", "std"):
        words = f"one number per channel ({data.channels})"
        yield len(data[field]) != data.channels, f"data.{field}", words
    words = "none if data.decoder is fast, which decodes only what a view needs"
    yield data.decoder == "fast" and cache != "none", "run.cache", words
    words = "none or host if train.cached_features is set"
    yield config.train.cached_features and cache == "device", "run.cache", words
    if data.stored_side is not None:
        words = f"None if data.train_view is {data.train_view}, which stores squares of data.resize"
        yield data.train_view != "area_crop", "data.stored_side", words
        yield cache != "device", "data.stored_side", "None unless run.cache is device"


def _of_evaluation(config: ConfigDict) -> Relations:
    fields, dim = config.eval, config.model.head_dim
    scaled = config.data.name == "features" and tuple(fields.scales) != (1.0,)
    yield scaled, "eval.scales", "1 if data.name is features"
    words = "False unless eval.pca.head or eval.pca.encoder is set"
    yield fields.whiten and not any(fields.pca.values()), "eval.whiten", words
    large = config.model.head != "none" and dim and (fields.pca.head or 0) > dim
    yield large, "eval.pca.head", f"at most model.head_dim ({dim})"
    words = "0 unless eval.expansion is set"
    yield fields.expansion_alpha and not fields.expansion, "eval.expansion_alpha", words


def _of_training(config: ConfigDict) -> Relations:
    """Rules of which parameters are trained, and when."""
    train, head, total = config.train, config.model.head, config.train.total_steps
    frozen = choices.freezes_encoder(config.optim.frozen)
    words = "set, and optim.frozen must name the encoder, if data.name is features"
    trained = not (frozen and train.cached_features)
    yield config.data.name == "features" and trained, "train.cached_features", words
    words = "another one if optim.frozen names the encoder"
    yield head == "none" and frozen, "model.head", words
    blocks = [name for name in config.optim.frozen if name != "patch_projection"]
    words = "False unless optim.frozen names the encoder, or its lowest layers"
    moving = train.cached_features and not any(map(choices.in_encoder, blocks))
    yield moving, "train.cached_features", words
    for field in ("lora_rank", "probe_steps"):
        words = "0 if optim.frozen names the encoder"
        yield train[field] and frozen, f"train.{field}", words
    if train.probe_steps:
        yield head == "none", "train.probe_steps", "0 if model.head is none"
        long = total is not None and train.probe_steps >= total
        yield long, "train.probe_steps", f"below train.total_steps ({total})"


_RELATIONS = (
    *(_of_batches, _of_model, _of_space, _of_learned_scalars, _of_prefixes),
    *(_of_data, _of_evaluation, _of_training),
)


def refuse_objective(name: Any) -> None:
    """Raises a `UserError` for a name that no objective has; it lists those without a prefix."""
    plain = ", ".join(each for each in OBJECTIVES if "+" not in each)
    words = f"one of {plain}, or a combination such as hier+supcon{nearest(str(name), OBJECTIVES)}"
    refuse("objective.name", name, words)


def refuse(field: str, value: Any, words: str) -> None:
    """Raises a `UserError` for an invalid value."""
    raise UserError(f"config.{field} is {value!r:.200}; it must be {words}")
