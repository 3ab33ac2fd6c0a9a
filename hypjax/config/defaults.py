"""Every field of a configuration with its default: the published recipe of Hyp-ViT.

Files in `configs/` start from `default_config` and set what differs. `docs/configuration.md`
explains each field and its values. Comments name the dataset whose value is the default.
"""

from collections.abc import Mapping
from typing import Any, TypeAlias

from flax.traverse_util import unflatten_dict
from ml_collections import ConfigDict
from ml_collections.config_dict import FieldReference

from hypjax.catalogue import ENGINES
from hypjax.config import choices
from hypjax.data import views
from hypjax.errors import UserError
from hypjax.fields import (
    ABOVE_0,
    Field,
    Rule,
    at_least,
    each,
    is_ascending,
    one_of,
    range_within,
    some_of,
    within,
)
from hypjax.geometry import SPACES
from hypjax.geometry.registry import simple_spaces
from hypjax.objectives.create import declaration

Config: TypeAlias = ConfigDict  # A configuration, for those who pass it on and do not read it.
HYP_VIT = "pairwise_cross_entropy"  # The objective of Hyp-ViT.
# Upper limits of sizes, far beyond any run's: a downloaded configuration must not exhaust the
# machine's memory, or run for days.
STEPS = 2**31 - 1
IMAGES = 10**9
BATCH = 10**6
SIDE = 2**12
DIM = 2**14
_BELOW_1 = Rule(lambda value: 0 <= value < 1, "at least 0 and below 1")
_FACTOR = Rule(lambda value: 0 < value <= 1, "above 0 and at most 1")
_CLASSES = Rule(
    lambda value: value >= 0 and (value < 1 or value == int(value)),
    "a number of classes, or a fraction of them below 1",
)
_SPACE_NAMES = ("objective", *simple_spaces())
_SCORE_SPACES = Rule(
    lambda value: value and some_of(_SPACE_NAMES).holds(value),
    f"one or more of {', '.join(_SPACE_NAMES)}, each once",
)
_PARTS = Rule(
    lambda value: not value or len(value) > 1 and {*value} <= {*simple_spaces()},
    "two or more of " + ", ".join(simple_spaces()),
)
_CURVATURES = 1e-12, 1e6  # Bounds on learned c; a ball of smaller c cannot be searched.
_PATH = Field(None, kind=str, optional=True)
_NOT_EMPTY = Rule(lambda value: value != "", "a name, a file or a folder")
_NAMES = f"names from {', '.join(choices.GROUPS)}, or paths such as model/head"
_PARAMETERS = each(choices.names_parameters, _NAMES)
_TARGETS = each(choices.names_kernels, "encoder, or paths such as model/encoder/block_*", least=1)
_JITTER = Rule(
    lambda value: len(value) == 4 and 0 <= min(value) and max(value[:3]) <= 1 and value[3] <= 0.5,
    "three numbers from 0 to 1, and one from 0 to 0.5",
)
_ACTIVATION = one_of("gelu", "quick_gelu", "gelu_tanh")
_KS = each(within(1, IMAGES).holds, "one or more numbers from 1 on", least=1, most=100)
_SCALES = each(lambda x: 0 < x <= 4, "one to ten numbers above 0 and up to 4", least=1, most=10)
_METRICS = Rule(
    lambda value: "recall" in value and set(value) <= set(choices.METRICS),
    "recall, and optionally any of " + ", ".join(choices.METRICS[1:]),
)


def _is_group(value: tuple[Any, ...]) -> bool:
    """Whether a value has the form of an item of `optim.groups`."""
    if len(value) != 4 or not choices.names_parameters(value[0]):
        return False
    rate_factor, weight_decay = Field(0.0, at_least(0)), Field(0.0, at_least(0), optional=True)
    fields = rate_factor, weight_decay, Field(0, within(0, STEPS))  # The last item is a step.
    return not any(field.requirement(x) for field, x in zip(fields, value[1:], strict=True))


_GROUPS = each(_is_group, "a list of (parameters, factor of the rate, decay or None, first step)")
_MESH = Rule(
    lambda value: len(value) == 2 and value[0] >= -1 and value[0] != 0 and value[1] >= 1,
    "two numbers: copies (−1: as many as fit) and shards",
)
# All fields except `config.objective`.
_FIELDS = {
    "name": Field(""),  # The configuration file's name, set when the file is loaded.
    "variant": Field(""),  # The file's variant. The default workdir has both names.
    "seed": Field(0, within(0, 2**32 - 1)),  # Of parameters and batches; JAX's keys have 32 bits.
    # Images, how they are decoded and cropped, and how their classes are split.
    "data.name": Field("glyphs", one_of(*choices.DATASETS)),
    "data.path": _PATH,  # Folder or table of your own images, or a file of features.
    "data.labels": _PATH,  # File with the classes of features, if the features' file has none.
    "data.captions": _PATH,  # File of captions; None: in the table, beside images, or prepared.
    "data.exclude": Field((), kind=str),  # Names or ends of paths of images to leave out.
    "data.skip_corrupt": Field(False),  # Whether to leave out your own images that are damaged.
    "data.decoder": Field("exact", one_of("exact", "fast")),  # 'fast': large JPEGs at reduced size.
    "data.stored_side": Field(None, within(1, SIDE), kind=int, optional=True),  # In `run.cache`.
    "data.channels": Field(3, Rule(lambda value: value in (1, 3), "1 or 3")),
    "data.image_size": Field(224, within(1, SIDE)),  # Side of the model's square input, in pixels.
    "data.train_view": Field("area_crop", one_of(*views.TRAIN_VIEWS)),  # RandomResizedCrop.
    "data.test_view": Field("centre_crop", one_of(*views.TEST_VIEWS)),
    "data.resize": Field(224, within(1, SIDE)),  # Side before the crop, in pixels; CUB: 256.
    "data.mean": Field((0.5, 0.5, 0.5)),  # For pixels in [0, 1]. ViT's; DeiT, DINO: ImageNet's.
    "data.std": Field((0.5, 0.5, 0.5), each(ABOVE_0.holds, "above 0 in every channel")),
    "data.crop_area": Field((0.2, 1.0), range_within(0, 1)),  # Share of the image area.
    "data.crop_ratio": Field((3 / 4, 4 / 3), range_within(0, float("inf"))),  # Aspect ratio.
    "data.flip": Field(0.5, within(0, 1)),  # Training view: probability of a horizontal flip.
    "data.colour_jitter": Field((0.0,) * 4, _JITTER),  # See `hypjax.models.colours`.
    "data.grey": Field(0.0, within(0, 1)),  # Share of training images that become grey.
    "data.blur": Field(0.0, within(0, 1)),  # Share of training images that are blurred.
    # What is held out for the test: classes, images of each class, or nothing.
    "data.split": Field("classes", one_of("classes", "images", "none")),
    "data.validation_classes": Field(0.0, _CLASSES),  # Number of classes, or share below 1.
    "data.test_classes": Field(0.0, _CLASSES),  # Number of classes, or share below 1.
    "data.split_seed": Field(0, at_least(0)),  # Chooses held-out classes; not config.seed.
    # The encoder (images to embeddings) and the head (a linear map to fewer dimensions).
    "model.architecture": Field("vit_small_patch16_224"),  # timm's, 'features' or of `UNSIZED`.
    "model.patch_size": Field(0, within(0, SIDE)),  # Side, in pixels; 0 if the name implies it.
    "model.width": Field(0, within(0, DIM), optional=True),  # 0 likewise.
    "model.depth": Field(0, within(0, 64)),  # Number of blocks; 0 likewise.
    "model.num_heads": Field(0, within(0, DIM)),  # Per block; 0 likewise.
    "model.mlp_ratio": Field(4.0, ABOVE_0),  # Width of perceptrons, relative to that of tokens.
    "model.weights": Field(None, _NOT_EMPTY, kind=str, optional=True),  # None: random weights.
    "model.load_head": Field(False),  # Whether the head starts from model.weights, too.
    "model.pooling": Field("cls"),  # In training, see `layers.poolings`.
    "model.eval_pooling": Field("cls"),
    "model.pool_first": Field(None, kind=bool, optional=True),  # timm's fc_norm; None: as timm.
    "model.norm_eps": Field(None, ABOVE_0, kind=float, optional=True),  # None: the family's.
    "model.activation": Field(None, _ACTIVATION, kind=str, optional=True),  # None: the family's.
    # Above about 6.3, `gem`'s smallest value to that power would be 0 in float32.
    "model.gem_exponent": Field(3.0, within(0.1, 6)),
    "model.learn_gem": Field(False),
    "model.head": Field("dense", one_of("dense", "norm_dense", "linear", "none")),
    "model.head_dim": Field(128, within(1, DIM), optional=True),  # None: the features' dimension.
    "model.head_init": Field("orthogonal", one_of("orthogonal", "pca")),  # Of the features.
    # The encoder of texts, see `hypjax.settings.TextSettings`, and its head; 0: no texts.
    "model.text.width": Field(0, within(0, DIM), optional=True),  # None: that of the features.
    "model.text.depth": Field(12, within(1, 64)),
    "model.text.num_heads": Field(8, within(1, DIM)),
    "model.text.vocabulary": Field(49_408, within(1, 10_000_000)),
    "model.text.context": Field(77, within(2, 4096)),
    "model.text.activation": Field("gelu", _ACTIVATION),
    "model.text.norm_eps": Field(1e-5, ABOVE_0),
    "model.text.mlp_ratio": Field(4.0, ABOVE_0),
    # 'features': a head on vectors of `encoder`, or of a file of features, of dimension `width`.
    "model.text.kind": Field("clip", one_of("clip", "siglip", "features")),
    "model.text.encoder": Field(None, _NOT_EMPTY, kind=str, optional=True),  # st:NAME, onnx:FILE.
    "model.text.head": Field("linear", one_of("dense", "linear", "none")),
    "model.text.max_norm": Field(None, ABOVE_0, kind=float, optional=True),  # None: any.
    "model.drop_path": Field(0.0, _BELOW_1),  # Rate of stochastic depth in the last block.
    "model.precision": Field("auto", one_of("auto", "float32", "bfloat16")),  # Of products.
    # Of the sums of a Transformer's blocks.
    "model.residual": Field("float32", one_of("float32", "products")),
    # The optimiser, its learning rate, and which parameters are frozen.
    "optim.learning_rate": Field(3e-5, at_least(0)),  # Peak. ViT and DeiT; DINO: 1e-5.
    "optim.name": Field("adamw", one_of(*choices.OPTIMIZERS)),
    "optim.schedule": Field("constant", one_of("constant", "cosine", "step", "exponential")),
    "optim.decay_every": Field(1000, within(1, STEPS)),  # Steps; of 'step' and 'exponential'.
    "optim.decay_factor": Field(0.5, _FACTOR),
    "optim.warmup_steps": Field(0, within(0, STEPS), optional=True),  # Linear, from 0.
    "optim.weight_decay": Field(0.01, at_least(0)),  # Applies to biases, too.
    "optim.b1": Field(0.9, _BELOW_1),  # Decay rate of Adam's first moment.
    "optim.b2": Field(0.999, _BELOW_1),  # Decay rate of Adam's second moment.
    "optim.eps": Field(1e-8, ABOVE_0),  # Adam's epsilon.
    "optim.momentum": Field(0.95, _BELOW_1),  # Momentum of SGD and Muon.
    "optim.gradient_factor": Field(1.0, ABOVE_0),  # Of the model's gradient; HIER: 0.5.
    "optim.clip_norm": Field(3.0, ABOVE_0, optional=True),  # Largest global norm of the gradient.
    "optim.clip_value": Field(None, ABOVE_0, kind=float, optional=True),  # Before the norm (HIER).
    "optim.frozen": Field(("patch_projection",), _PARAMETERS),
    "optim.groups": Field((), _GROUPS, kind=tuple),
    "optim.layer_decay": Field(1.0, _FACTOR),  # Factor of the rate, for each layer further down.
    # Length of training and composition of batches.
    # None for any of these three or for optim.warmup_steps: fitted to the user's own data.
    "train.total_steps": Field(200, within(0, STEPS), optional=True),  # CUB.
    "train.batch_size": Field(900, within(1, BATCH), optional=True),
    "train.samples_per_class": Field(2, within(2, BATCH), optional=True),  # CUB and Cars: 9.
    "train.sampling": Field("epoch_classes", one_of(*choices.SAMPLINGS)),  # `hypjax.data.plans`.
    "train.tuples.pairs": Field(2_000, within(1, IMAGES)),  # Tuples in each epoch.
    "train.tuples.negatives": Field(5, within(1, IMAGES)),  # Per tuple, each of another class.
    "train.tuples.pool": Field(22_000, within(1, IMAGES)),  # Images among which they are mined.
    "train.repeat_images": Field(False),  # Whether a class's images repeat in a batch (HIER).
    "train.unlabelled": Field(False),  # Whether each image is a class of its own.
    "train.cached_features": Field(False),  # Whether to train on features computed once.
    "train.lora_rank": Field(0, within(0, DIM)),  # Rank of the encoder's LoRA adapters; 0: none.
    "train.lora_alpha": Field(16.0, ABOVE_0),  # Scale α of LoRA.
    "train.lora_targets": Field(("model/encoder/*block*",), _TARGETS),  # Kernels with adapters.
    "train.head_warmup_steps": Field(0, within(0, STEPS)),  # First steps: only the head learns.
    "train.patience": Field(0, within(0, STEPS)),  # Validations without gain until a stop; 0: any.
    "train.ema_decay": Field(0.0, _BELOW_1),  # Decay of the evaluated average; 0: none.
    "train.on_nonfinite": Field("stop", one_of("stop", "skip")),  # If an update is not finite.
    "train.on_collapse": Field("warn", one_of("warn", "stop")),  # If embeddings coincide.
    "train.max_nonfinite": Field(10, within(1, STEPS)),  # Skipped updates after which a run stops.
    # Measurements, and how often they are made.
    "eval.ks": Field((1, 2, 4, 8), _KS),
    "eval.metrics": Field(("recall",), _METRICS),
    "eval.spaces.head": Field(("objective",), _SCORE_SPACES),
    "eval.spaces.encoder": Field(("sphere",), _SCORE_SPACES),
    # Beside the trained prefixes, which are always scored.
    "eval.prefixes": Field((), Rule(is_ascending, "ascending numbers above 0"), kind=int),
    "eval.every": Field(0, within(0, STEPS)),  # Steps between validations; 0: at the end.
    "eval.benchmarks": Field((), some_of(choices.BENCHMARKS)),  # Further datasets to score.
    "eval.distractors": Field(False),  # Whether revisitop1m joins galleries with ground truth.
    "eval.scales": Field((1.0,), _SCALES),  # Sides relative to data.image_size.
    "eval.pca.head": Field(None, within(1, DIM), kind=int, optional=True),  # IRT: 128.
    "eval.pca.encoder": Field(None, within(1, DIM), kind=int, optional=True),
    "eval.whiten": Field(False),  # Whether principal components get equal variances.
    "eval.expansion": Field(0, within(0, IMAGES)),  # Images in query expansion; 0: none.
    "eval.expansion_alpha": Field(0.0, at_least(0)),  # Exponent of their weights; 0: average.
    "eval.rerank": Field(False),  # Whether the first 100 results are re-ranked (k-reciprocal).
    # Where and how the run is executed; these fields may change when it is resumed.
    "run.data_dir": _PATH,  # Folder or URL of prepared datasets.
    "run.workers": Field(0, within(0, 1000)),  # Processes that decode images; 0 uses threads.
    "run.cache": Field("none", one_of("none", "host", "device")),  # Where decoded images are kept.
    "run.cache_dir": _PATH,  # Folder of cached images and features. None: in ~/.cache/hypjax.
    "run.mesh": Field((-1, 1), _MESH),  # Copies and shards of the parameters.
    "run.sharding": Field("replicate", one_of("replicate", "fsdp")),  # 'fsdp': all devices share.
    "run.microbatch": Field(0, within(0, BATCH)),  # Images per step of gradient accumulation.
    "run.attention": Field("auto", one_of("auto", "cudnn", "xla")),  # 'auto' prefers cuDNN's.
    "run.engine": Field("auto", one_of(*ENGINES)),  # What runs encoders on a CPU.
    "run.remat": Field(False),  # Whether to recompute activations for the gradient.
    "run.eval_batch_size": Field(256, within(1, BATCH)),  # Images per batch in evaluation.
    "run.log_every": Field(10, within(1, STEPS)),  # Steps between lines of metrics.jsonl.
    "run.gradient_covariance": Field(False),  # Whether each step measures its nuclear norm (IRT).
    "run.checkpoint_every": Field(100, within(1, STEPS)),  # Steps between checkpoints.
    "run.report": Field(True),  # Whether a finished run writes report.html, see `hypjax.report`.
    "run.wandb_project": _PATH,  # Project of Weights & Biases. None: W&B is not used.
}


def default_config(objective: str = HYP_VIT) -> ConfigDict:
    """Returns the recipe of Ermolov et al., CVPR 2022 (Section 4 and code)."""
    return _defaults(fields_of(objective)).lock()


def choose_objective(config: ConfigDict, name: str) -> None:
    """Chooses an objective, sets its fields to their defaults, and keeps the space."""
    objective = _defaults(objective_fields(name))
    objective.update({field: config.objective[field] for field in _space_fields()})
    with config.unlocked():
        config.objective = objective.lock()


def fields_of(objective: str) -> dict[str, Field]:
    """Returns all fields of a configuration with this objective, by dotted name."""
    fields = objective_fields(objective).items()
    return _FIELDS | {f"objective.{name}": field for name, field in fields}


def objective_fields(name: str) -> dict[str, Field]:
    """Returns the fields of `config.objective`: the name, the space's fields, and the loss's."""
    shared_fields = {"name": Field(name), **_space_fields()}
    loss_fields = declaration(name).fields
    for field in sorted(shared_fields.keys() & loss_fields.keys()):
        problem = f"objective {name} declares the field {field}, which all objectives have"
        raise UserError(f"{problem}; rename it")
    return {**shared_fields, **loss_fields}


def _defaults(fields: Mapping[str, Field]) -> ConfigDict:
    defaults = {
        name: FieldReference(field.default, field.kind) if field.optional else field.default
        for name, field in fields.items()
    }
    return ConfigDict(unflatten_dict(defaults, sep="."))


def _space_fields() -> dict[str, Field]:
    spaces = f"one of {', '.join(SPACES)}, or a space that hypjax.register_space names"
    numbers = f"at most 100 numbers, each at least 0 and up to {_CURVATURES[1]:g}"
    curvatures = each(within(0, _CURVATURES[1]).holds, numbers, most=100)
    return {
        "space": Field("poincare", Rule(lambda value: value in SPACES, spaces)),
        "c": Field(0.1, at_least(0)),  # The ball has curvature -c and radius 1/sqrt(c); 0 is flat.
        "learn_c": Field(False),  # Whether c is learned, starting from `c`.
        "c_bounds": Field((0.01, 10.0), range_within(*_CURVATURES)),  # Bounds of a learned c.
        "c_rate": Field(1.0, at_least(0)),  # Factor of the learning rate, for c.
        # Unless empty, distances are averaged over balls of these curvatures instead of c.
        "curvatures": Field((), curvatures, kind=float),
        # Spaces of a product, or of a fused space, which adds distances of the same features;
        # weights of their distances, () for 1; and whether a product adds its distances, too.
        "parts": Field((), _PARTS),
        "weights": Field((), each(at_least(0).holds, "numbers of 0 or more"), kind=float),
        "summed": Field(False),
        "learn": Field(()),  # Other learned scalars, such as 'temperature'.
        "clip_radius": Field(2.3, ABOVE_0, optional=True),  # Largest norm of features; None: any.
        "feature_scale": Field(1.0, ABOVE_0),  # Factor of features, on the hyperboloid.
        # Largest distance from the origin: features are rescaled to it instead of being clipped.
        "max_distance": Field(None, ABOVE_0, kind=float, optional=True),
    }
