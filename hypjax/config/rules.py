"""Validation: the type and range of each field, and rules between fields."""

import dataclasses
import functools
import sys
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from hypjax.config import choices
from hypjax.config.choices import OWN
from hypjax.config.defaults import HYP_VIT, default_config
from hypjax.config.identity import flatten
from hypjax.errors import UserError, nearest
from hypjax.fields import (
    ABOVE_0,
    Field,
    Rule,
    at_least,
    is_ascending,
    one_of,
    range_within,
    within,
)
from hypjax.geometry import SPACES
from hypjax.geometry.learned import has_curvature, learned_numbers
from hypjax.models.architectures import ARCHITECTURES, is_transformer, supported
from hypjax.models.encoder import FEATURES
from hypjax.models.own import ENCODERS
from hypjax.objectives import OBJECTIVES
from hypjax.objectives.base import GROUPED
from hypjax.objectives.create import create_objective, create_space
from hypjax.objectives.matryoshka import trained_prefixes
from hypjax.objectives.own import BUILT_IN, is_known

# Fields that may be None for the user's own data, which they then fit; the sizes only for features.
_FITTED_SIZES = ("model.head_dim", "model.width")
FITTED = frozenset(f"train.{name}" for name in ("batch_size", "samples_per_class", "total_steps"))
FITTED |= {"optim.warmup_steps", *_FITTED_SIZES}
# Fields that may be None.
OPTIONAL = FITTED | {
    *("data.path", "data.labels", "data.stored_side", "model.weights", "objective.clip_radius"),
    *("optim.clip_norm", "optim.clip_value", *(f"eval.pca.{part}" for part in choices.PARTS)),
    *("run.cache_dir", "run.data_dir", "run.wandb_project"),
}
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
        and (type(start) is int and 0 <= start <= _STEPS)
    )


def field_types(objective: str) -> Mapping[str, Rule]:
    """The rule, for each field of an objective's runs, that a value has the type of the default."""
    return _field_types(objective, tuple(OBJECTIVES[objective].fields.items()))


@functools.cache
def _field_types(objective: str, fields: tuple[tuple[str, Field], ...]) -> Mapping[str, Rule]:
    del fields  # They differ if a name is registered again.
    config = default_config(objective)
    return {field: _type(field, value, config) for field, value in flatten(config).items()}


def _type(field: str, default: Any, config: ConfigDict) -> Rule:
    if field == "optim.groups":
        return Rule(
            lambda value: isinstance(value, tuple) and all(map(_is_group, value)),
            "a list of (parameters, factor of the rate, decay or None, first step)",
        )
    if isinstance(default, tuple):
        scalar = _SCALARS[type(default[0]) if default else _ITEMS.get(field, str)]
        return Rule(
            lambda value: isinstance(value, tuple) and all(map(scalar.holds, value)),
            f"a list whose items are each {scalar.words}",
        )
    *groups, name = field.split(".")
    group = functools.reduce(getattr, groups, config)
    scalar = _SCALARS[group.get_type(name) if default is None else type(default)]
    return _or_none(scalar) if field in OPTIONAL else scalar


def _or_none(rule: Rule) -> Rule:
    return Rule(lambda value: value is None or rule.holds(value), f"{rule.words}, or None")


_CLASSES = Rule(
    lambda value: value >= 0 and (value < 1 or value == int(value)),
    "a number of classes, or a fraction of them below 1",
)
_SCORE_SPACES = Rule(
    lambda value: value and len(set(value)) == len(value) and set(value) <= {"objective", *SPACES},
    "one or more of objective, " + ", ".join(SPACES) + ", each once",
)
_SHOWN = 200  # Characters of a value in a message.
# Largest sizes: far beyond what runs use, and small enough that a configuration by anyone else is
# refused, or its model fails, before it takes the machine's memory or days.
_STEPS = 2**31 - 1
_IMAGES = 10**9
_BATCH = 10**6
_SIDE = 2**12
_DIM = 2**14
_CURVATURES = 1e-12, 1e6  # Within which c is learned; a ball of a smaller one is not searched.
_BELOW_1 = Rule(lambda value: 0 <= value < 1, "at least 0 and below 1")

_SIZES = ("patch_size", "width", "depth", "num_heads")  # Of an encoder.

_RULES = {
    "seed": within(0, 2**32 - 1),  # JAX's keys drop further bits.
    "data.name": one_of(*choices.DATASETS),
    "data.split": one_of(*choices.SPLITS_BY),
    "data.decoder": one_of("exact", "fast"),
    "data.stored_side": _or_none(within(1, _SIDE)),
    "data.channels": Rule(lambda value: value in (1, 3), "1 or 3"),
    "data.image_size": within(1, _SIDE),
    "data.train_view": one_of(*choices.TRAIN_VIEWS),
    "data.test_view": one_of(*choices.TEST_VIEWS),
    "data.resize": within(1, _SIDE),
    "data.std": Rule(lambda value: all(v > 0 for v in value), "above 0 in every channel"),
    "data.crop_area": range_within(0, 1),
    "data.crop_ratio": range_within(0, float("inf")),
    "data.flip": within(0, 1),
    "data.validation_classes": _CLASSES,
    "data.test_classes": _CLASSES,
    "data.split_seed": at_least(0),
    "model.patch_size": within(0, _SIDE),
    "model.width": within(0, _DIM),
    "model.depth": within(0, 64),
    "model.num_heads": within(0, _DIM),
    "model.head": one_of(*choices.HEADS),
    "model.head_init": one_of(*choices.HEAD_INITS),
    "model.head_dim": within(1, _DIM),
    "model.weights": Rule(lambda value: value != "", "a name, a file or a folder, or None"),
    "model.drop_path": _BELOW_1,
    "model.precision": one_of("auto", "float32", "bfloat16"),
    "objective.space": Rule(
        lambda value: value in SPACES,
        f"one of {', '.join(SPACES)}, or a space that hypjax.register_space names in this process",
    ),
    "objective.c": at_least(0),
    "objective.clip_radius": _or_none(ABOVE_0),
    "objective.feature_scale": ABOVE_0,
    "objective.c_bounds": range_within(*_CURVATURES),
    "objective.c_rate": at_least(0),
    "objective.curvatures": Rule(
        lambda value: len(value) <= 100 and all(0 <= c <= _CURVATURES[1] for c in value),
        f"at most 100 numbers, each at least 0 and up to {_CURVATURES[1]:g}",
    ),
    "optim.learning_rate": at_least(0),
    "optim.name": one_of("adamw", "adam"),
    "optim.schedule": one_of("constant", "cosine", "step", "exponential"),
    "optim.decay_every": within(1, _STEPS),
    "optim.decay_factor": Rule(lambda value: 0 < value <= 1, "above 0 and at most 1"),
    "optim.warmup_steps": within(0, _STEPS),
    "optim.weight_decay": at_least(0),
    "optim.b1": _BELOW_1,
    "optim.b2": _BELOW_1,
    "optim.eps": ABOVE_0,
    "optim.clip_norm": _or_none(ABOVE_0),
    "optim.clip_value": _or_none(ABOVE_0),
    "optim.frozen": Rule(
        lambda value: all(map(choices.names_parameters, value)),
        f"names from {', '.join(choices.GROUPS)}, or paths such as model/head",
    ),
    "optim.layer_decay": Rule(lambda value: 0 < value <= 1, "above 0 and at most 1"),
    "train.lora_rank": within(0, _DIM),
    "train.lora_alpha": ABOVE_0,
    "train.lora_targets": Rule(
        lambda value: value and all(map(_in_encoder, value)),
        "encoder, or paths such as model/encoder/block_*",
    ),
    "train.probe_steps": within(0, _STEPS),
    "train.ema_decay": _BELOW_1,
    "train.total_steps": within(0, _STEPS),  # 0: only evaluated.
    "train.batch_size": within(1, _BATCH),
    "train.samples_per_class": within(2, _BATCH),
    "train.sampling": one_of(*choices.SAMPLINGS),
    **{f"train.tuples.{name}": within(1, _IMAGES) for name in ("pairs", "negatives", "pool")},
    "train.on_nonfinite": one_of("stop", "skip"),
    "train.max_nonfinite": within(1, _STEPS),
    "train.on_collapse": one_of("warn", "stop"),
    "eval.ks": Rule(
        lambda value: 0 < len(value) <= 100 and min(value) >= 1 and max(value) <= _IMAGES,
        f"one or more numbers, each at least 1 and up to {_IMAGES}",
    ),
    "eval.metrics": Rule(
        lambda value: "recall" in value and set(value) <= set(choices.METRICS),
        "recall, and optionally any of " + ", ".join(choices.METRICS[1:]),
    ),
    **{f"eval.spaces.{part}": _SCORE_SPACES for part in choices.PARTS},
    "eval.prefixes": Rule(is_ascending, "ascending numbers above 0"),
    "eval.benchmarks": Rule(
        lambda value: len(set(value)) == len(value) and set(value) <= set(choices.BENCHMARKS),
        "any of " + ", ".join(choices.BENCHMARKS) + ", each once",
    ),
    "eval.every": within(0, _STEPS),
    "eval.scales": Rule(
        lambda value: 0 < len(value) <= 10 and 0 < min(value) and max(value) <= 4,
        "one to ten numbers, each above 0 and up to 4",
    ),
    **{f"eval.pca.{part}": _or_none(within(1, _DIM)) for part in choices.PARTS},
    "eval.expansion": within(0, _IMAGES),
    "eval.expansion_alpha": at_least(0),
    "run.workers": within(0, 1000),
    "run.cache": one_of("none", "host", "device"),
    "run.attention": one_of("auto", "cudnn", "xla"),
    "run.mesh": Rule(
        lambda value: (
            len(value) == 2
            and (value[0] == -1 or value[0] >= 1)
            and value[1] >= 1
            and max(value) <= _BATCH
        ),
        "two numbers: copies of the parameters (−1: as many as possible) and shards of each copy",
    ),
    "run.microbatch": within(0, _BATCH),
    "run.eval_batch_size": within(1, _BATCH),
    "run.log_every": within(1, _STEPS),
    "run.checkpoint_every": within(1, _STEPS),
}


def validate(config: ConfigDict) -> None:
    """Validates a configuration before anything is compiled; an error names the field."""
    fields = flatten(config)
    if (name := fields.get("objective.name", HYP_VIT)) not in list(OBJECTIVES):
        refuse_objective(name)
    known = field_types(name)
    for field in sorted(fields.keys() - known.keys()):
        raise UserError(f"unknown field config.{field}{nearest(field, known)}")
    for field in sorted(known.keys() - fields.keys()):
        raise UserError(f"config.{field} is missing; start from hypjax.config.default_config()")
    for field, value in fields.items():
        if not known[field].holds(value):
            refuse(field, value, known[field].words)
    own = {f"objective.{field}": own.rule for field, own in OBJECTIVES[name].fields.items()}
    for field, rule in (_RULES | own).items():
        if not (field in FITTED and fields[field] is None) and not rule.holds(fields[field]):
            refuse(field, fields[field], rule.words)
    _validate_batches(config)
    _validate_architecture(config)
    if config.model.load_head and not config.model.weights:
        refuse("model.load_head", True, "False unless model.weights names a run")
    if config.model.load_head and config.model.head == "none":
        refuse("model.load_head", True, "False if model.head is none")
    if config.model.head_init == "pca" and config.model.head != "dense":
        refuse("model.head_init", "pca", "orthogonal unless model.head is dense")
    if config.model.head_init == "pca" and config.model.load_head:
        refuse("model.head_init", "pca", "orthogonal if model.load_head is set")
    _validate_curvatures(config)
    _validate_learned_numbers(config)
    _validate_prefixes(config)
    _validate_data(config)
    _validate_caches(config)
    _validate_evaluation(config)
    _validate_training(config)


def _validate_curvatures(config: ConfigDict) -> None:
    fields = config.objective
    if not fields.curvatures:
        return
    if not has_curvature(SPACES[fields.space]):
        words = f"() if objective.space is {fields.space}, which has no curvature"
        refuse("objective.curvatures", fields.curvatures, words)
    if fields.name.endswith("hypmix") or fields.name.startswith(("hier+", "cones+")):
        words = f"() for {fields.name}, which has one ball"
        refuse("objective.curvatures", fields.curvatures, words)


def _validate_learned_numbers(config: ConfigDict) -> None:
    fields, own = config.objective, OBJECTIVES[config.objective.name].fields
    learnable = [name for name, field in own.items() if field.learnable]
    of_space = dataclasses.fields(SPACES[fields.space])
    learnable += [field.name for field in of_space if field.metadata.get("learnable")]
    for name in fields.learn:
        if name == "c":
            words = "without c, whose curvature objective.learn_c learns"
            refuse("objective.learn", fields.learn, words)
        if name not in learnable or fields.learn.count(name) > 1:
            known = f"any of {', '.join(learnable)}, each once," if learnable else "()"
            refuse("objective.learn", fields.learn, f"{known} for {fields.name}")
        if not fields[name] > 0:
            refuse(f"objective.{name}", fields[name], "above 0 if objective.learn names it")
    if fields.get("memory") and (moving := [f.name for f in of_space if f.name in fields.learn]):
        words = f"0 if {moving[0]} is learned, since a memory holds points of earlier ones"
        refuse("objective.memory", fields.memory, words)
    if fields.learn_c:
        _validate_learned_curvature(config)
    if fields.name not in BUILT_IN and is_known(fields.name) and (fields.learn_c or fields.learn):
        _validate_own_space(config)


def _validate_learned_curvature(config: ConfigDict) -> None:
    fields = config.objective
    low, high = fields.c_bounds
    if not has_curvature(SPACES[fields.space]):
        words = f"False if objective.space is {fields.space}, which has no curvature"
        refuse("objective.learn_c", True, words)
    name = "curvatures" if fields.curvatures else "c"
    if not all(low <= c <= high for c in (fields.curvatures or [fields.c])):
        words = f"within objective.c_bounds ({low:g} to {high:g}) if objective.learn_c is set"
        refuse(f"objective.{name}", fields[name], words)
    if fields.get("memory"):
        words = "0 if objective.learn_c is set, since a memory holds points of earlier curvatures"
        refuse("objective.memory", fields.memory, words)


def _validate_prefixes(config: ConfigDict) -> None:
    """Rules of the prefixes of the head's output that are trained and scored."""
    trained, dim = trained_prefixes(config), config.model.head_dim
    fields = {"objective.dims": trained, "eval.prefixes": config.eval.prefixes}
    for field, dims in fields.items():
        if dims and config.model.head != "none" and dim and max(dims) >= dim:
            refuse(field, dims, f"below model.head_dim ({dim}), which is added to them")
        if dims and config.eval.pca.head:
            refuse("eval.pca.head", config.eval.pca.head, "None if prefixes of the head are scored")
    if trained and config.objective.get("memory"):
        words = f"0 for {config.objective.name}, since a memory holds points of one dimension"
        refuse("objective.memory", config.objective.memory, words)


def _validate_own_space(config: ConfigDict) -> None:
    """Refuses what a user's objective cannot learn: its scores are those of the saved space.

    A learned c takes the place of that of the saved space; other numbers must not be part of it.
    """
    fields = config.objective
    name, numbers = fields.name.removeprefix(OWN), learned_numbers(fields)
    if "curvatures" in numbers:
        refuse(
            "objective.curvatures", fields.curvatures, f"() if the curvature of {name} is learned"
        )
    other = config.copy_and_resolve_references()
    with other.unlocked():
        other.objective.update({field: 2 * number for field, number in numbers.items()})
    space = create_space(other.objective)
    objective = OBJECTIVES[fields.name].create(other, space)
    if fields.learn_c and not objective.space == space == objective.score_space:
        refuse("objective.learn_c", True, f"False for {name}, which has a space of its own")
    if not fields.learn_c and objective.score_space != create_objective(config).score_space:
        refuse("objective.learn", fields.learn, f"() for {name}, whose scores depend on them")


def _in_encoder(name: Any) -> bool:
    path = choices.GROUPS["encoder"]
    return choices.names_parameters(name) and choices.parameter_path(name)[: len(path)] == path


def _validate_training(config: ConfigDict) -> None:
    """Rules of which parameters are trained, and when."""
    train, head, total = config.train, config.model.head, config.train.total_steps
    frozen = choices.freezes_encoder(config.optim.frozen)
    if config.data.name == "features" and not (frozen and train.cached_features):
        words = "set, and optim.frozen must name the encoder, if data.name is features"
        refuse("train.cached_features", train.cached_features, words)
    if head == "none" and frozen:
        refuse("model.head", head, "another one if optim.frozen names the encoder")
    blocks = [name for name in config.optim.frozen if name != "patch_projection"]
    if train.cached_features and not any(map(_in_encoder, blocks)):
        words = "False unless optim.frozen names the encoder, or its lowest layers"
        refuse("train.cached_features", True, words)
    for field in ("lora_rank", "probe_steps"):
        if train[field] and frozen:
            refuse(f"train.{field}", train[field], "0 if optim.frozen names the encoder")
    if train.probe_steps and head == "none":
        refuse("train.probe_steps", train.probe_steps, "0 if model.head is none")
    if train.probe_steps and total is not None and train.probe_steps >= total:
        refuse("train.probe_steps", train.probe_steps, f"below train.total_steps ({total})")


def _validate_evaluation(config: ConfigDict) -> None:
    fields, dim = config.eval, config.model.head_dim
    if config.data.name == "features" and tuple(fields.scales) != (1.0,):
        refuse("eval.scales", fields.scales, "1 if data.name is features")
    if fields.whiten and not any(fields.pca.values()):
        refuse("eval.whiten", True, "False unless eval.pca.head or eval.pca.encoder is set")
    if config.model.head != "none" and dim and (fields.pca.head or 0) > dim:
        refuse("eval.pca.head", fields.pca.head, f"at most model.head_dim ({dim})")
    if fields.expansion_alpha and not fields.expansion:
        refuse("eval.expansion_alpha", fields.expansion_alpha, "0 unless eval.expansion is set")


def _validate_batches(config: ConfigDict) -> None:
    train, fields, objective = config.train, flatten(config), OBJECTIVES[config.objective.name]
    for field in sorted(FITTED):
        size = field in _FITTED_SIZES
        names = ("features",) if size else choices.USERS
        fitted = config.data.name in names or (train.cached_features and not size)
        if fields[field] is None and not fitted:
            cached = "" if size else ", or train.cached_features is set"
            words = f"a whole number, unless data.name is {' or '.join(names)}{cached}"
            refuse(field, None, words)
    if objective.by_tuple and train.sampling != "tuples":
        refuse("train.sampling", train.sampling, "tuples: this objective compares their images")
    if train.sampling not in GROUPED and objective.by_class:
        words = "epoch_classes or drawn_classes: this objective compares images of one class"
        refuse("train.sampling", train.sampling, words)
    if any(fields[field] is None for field in FITTED):
        return  # What fits the images is known later.
    size = 2 + train.tuples.negatives
    if train.sampling == "tuples" and train.batch_size % size:
        words = f"a multiple of {size}, the images of a tuple (2 more than train.tuples.negatives)"
        refuse("train.batch_size", train.batch_size, words)
    classes, rest = divmod(train.batch_size, train.samples_per_class)
    if train.sampling in GROUPED and (rest or classes < 2):
        samples = train.samples_per_class
        words = f"a multiple of train.samples_per_class ({samples}), and at least {2 * samples}"
        refuse("train.batch_size", train.batch_size, words)
    if neighbors := config.objective.get("hier_neighbors"):  # With fewer points, all are related.
        for field in ("objective.hier_proxies", "train.batch_size"):
            if fields[field] <= neighbors:
                refuse(field, fields[field], f"above objective.hier_neighbors ({neighbors})")
    if config.optim.warmup_steps > train.total_steps:
        words = f"at most train.total_steps ({train.total_steps})"
        refuse("optim.warmup_steps", config.optim.warmup_steps, words)


def _validate_architecture(config: ConfigDict) -> None:
    model = config.model
    if (model.architecture == FEATURES) != (config.data.name == "features"):
        words = "features if data.name is features, and nowhere else"
        refuse("model.architecture", model.architecture, words)
    if model.architecture not in ("vit", FEATURES, *ARCHITECTURES, *ENCODERS):
        words = f"{supported(model.architecture)}, or vit with sizes of your own"
        if model.architecture.startswith(OWN):
            words = (
                "known in this process: its code is not hypjax's, so pass the module as encoder= "
                "to hypjax.load, whose model embeds, saves galleries and searches, or to "
                "hypjax.train; or name it by hypjax.register_encoder"
            )
        refuse("model.architecture", model.architecture, words)
    for field in _SIZES:
        if model.architecture == "vit" and model[field] == 0:
            refuse(f"model.{field}", 0, "at least 1 if model.architecture is vit")
        given = model.architecture == FEATURES and field == "width"
        if model.architecture != "vit" and not given and model[field] != 0:
            sizes = " ".join(f"--config.model.{size}=0" for size in _SIZES if model[size])
            words = f"0 if an architecture with sizes of its own is named; add {sizes}"
            refuse(f"model.{field}", model[field], words)
    if model.architecture == "vit" and model.width % model.num_heads:
        refuse("model.width", model.width, f"a multiple of model.num_heads ({model.num_heads})")
    if model.drop_path and not is_transformer(model.architecture):
        refuse("model.drop_path", model.drop_path, "0 unless the architecture is a Transformer")
    if model.drop_path and config.train.cached_features:
        words = "0 if train.cached_features is set, since the encoder is not run in training"
        refuse("model.drop_path", model.drop_path, words)


def _validate_data(config: ConfigDict) -> None:
    data = config.data
    if data.name == "folder" and not data.path:
        refuse("data.path", data.path, "images: a folder, a table, a dataset or hf://OWNER/NAME")
    if data.name == "features" and not data.path:
        refuse("data.path", data.path, "a .npz, .npy or .parquet file of features")
    if data.name not in ("folder", "features") and data.path:
        refuse("data.path", data.path, f"None if data.name is {data.name}")
    if data.name != "features" and data.labels:
        refuse("data.labels", data.labels, "None unless data.name is features")
    if data.split == "images" and data.name not in choices.USERS:
        refuse("data.split", data.split, "classes unless data.name is folder or features")
    if data.split == "images" and data.validation_classes >= 1:
        refuse("data.validation_classes", data.validation_classes, "0 if data.split is images")
    crops = data.train_view == "resize_crop" or data.test_view == "centre_crop"
    if crops and data.resize < data.image_size:
        refuse("data.resize", data.resize, f"at least data.image_size ({data.image_size})")
    for field in ("mean", "std"):
        if len(data[field]) != data.channels:
            refuse(f"data.{field}", data[field], f"one number per channel ({data.channels})")


def _validate_caches(config: ConfigDict) -> None:
    data, cache = config.data, config.run.cache
    if data.decoder == "fast" and cache != "none":
        words = "none if data.decoder is fast, which decodes only what a view needs"
        refuse("run.cache", cache, words)
    if config.train.cached_features and cache == "device":
        refuse("run.cache", cache, "none or host if train.cached_features is set")
    if data.stored_side is not None and data.train_view != "area_crop":
        words = f"None if data.train_view is {data.train_view}, which stores squares of data.resize"
        refuse("data.stored_side", data.stored_side, words)
    if data.stored_side is not None and cache != "device":
        refuse("data.stored_side", data.stored_side, "None unless run.cache is device")


def refuse_objective(name: Any) -> None:
    """Raises a `UserError` for a name that no objective has; it lists those without a prefix."""
    plain = [each for each in OBJECTIVES if "+" not in each]
    prefixes = sorted({each.partition("+")[0] + "+" for each in OBJECTIVES if "+" in each})
    refuse(
        "objective.name",
        name,
        f"one of {', '.join(plain)}, or one of these after {', '.join(prefixes)} where the losses "
        "can be combined" + nearest(str(name), OBJECTIVES),
    )


def refuse(field: str, value: Any, words: str) -> None:
    """Raises a `UserError` for an invalid value."""
    shown = repr(value)
    shown = shown if len(shown) <= _SHOWN else f"{shown[:_SHOWN]}…"
    raise UserError(f"config.{field} is {shown}; it must be {words}")
