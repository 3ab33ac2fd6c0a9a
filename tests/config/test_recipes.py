"""The configurations of the four benchmarks: published values."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hypjax.config import default_workdir, flatten, identity, load_config, validate, variants
from hypjax.models import create_embedder, create_encoder, model_shapes
from hypjax.models.architectures import published_weights
from hypjax.models.split_at_block import highest_frozen
from hypjax.objectives.pair_losses import PAIR_LOSSES
from hypjax.training.optim import split_frozen
from hypjax.types import View

# These values are copied from the papers and the released code, not from hypjax.config.recipes.


def group(name, /, **fields):
    """Fields of a group by their whole names."""
    return {f"{name}.{field}": value for field, value in fields.items()}


# Of `config.objective`, on the sphere, too.
BALL = {
    "c": 0.1,
    "learn_c": False,
    "c_bounds": (0.01, 10.0),
    "c_rate": 1.0,
    "curvatures": (),
    "parts": (),
    "summed": False,
    "learn": (),
    "clip_radius": 2.3,
    "feature_scale": 1.0,
}
COMMON = (
    {"seed": 0}
    | group("data", path=None, channels=3, image_size=224, flip=0.5, validation_classes=0.0)
    | group("data", crop_area=(0.2, 1.0), crop_ratio=(0.75, 4 / 3))
    | group("model", pooling="cls", head_dim=128, precision="auto")
    | group("objective", name="pairwise_cross_entropy", temperature=0.2, **BALL)
    | group("optim", schedule="constant", warmup_steps=0, weight_decay=0.01, clip_norm=3.0)
    | group("optim", b1=0.9, b2=0.999, eps=1e-8, frozen=("patch_projection",))
    | group("train", on_nonfinite="stop")
    | group("eval", metrics=("recall",), every=0)
)
SPACES = {"hyp": {"objective.space": "poincare"}, "sph": {"objective.space": "sphere"}}
IMAGENET = group("data", mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))


def pretrained(architecture, weights, eval_pooling, rate, pixels=IMAGENET):
    model = {"weights": f"{architecture}.{weights}", "eval_pooling": eval_pooling}
    rate = {"optim.learning_rate": rate}
    return group("model", architecture=architecture, **model) | rate | pixels


PATCH8 = group("train", batch_size=120, samples_per_class=2)
HALVES = group("data", mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
ENCODERS = {
    "vit": pretrained("vit_small_patch16_224", "augreg_in21k_ft_in1k", "cls", 3e-5, HALVES),
    "deit": pretrained("deit_small_distilled_patch16_224", "fb_in1k", "cls_dist_mean", 3e-5),
    "dino": pretrained("vit_small_patch16_224", "dino", "cls", 1e-5),
    "dino-patch8": pretrained("vit_small_patch8_224", "dino", "cls", 1e-5) | PATCH8,
}
# Dataset name, shorter side of the test view, K, batch size, samples per class, and the number of
# steps in the paper and in the released commands.
DATASETS = {
    "cub": ("cub200", 256, (1, 2, 4, 8), 900, 9, (200, 50)),
    "cars": ("cars196", 224, (1, 2, 4, 8), 882, 9, (600, 300)),
    "sop": ("sop", 224, (1, 10, 100, 1000), 900, 2, (25_000, 5_000)),
    "inshop": ("inshop", 224, (1, 10, 20, 30), 900, 2, (2_200, 3_200)),
}


def published(dataset, variant):
    """Returns the published values of a recipe's fields."""
    name, resize, ks, batch_size, samples, steps = DATASETS[dataset]
    space, _, encoder = variant.partition("-")
    encoder, _, released = encoder.partition(",")
    fields = {
        "name": dataset,
        "variant": variant,
        "data.name": name,
        "data.resize": resize,
        "eval.ks": ks,
        "train.batch_size": batch_size,
        "train.samples_per_class": samples,
        "train.total_steps": steps[bool(released)],
    }
    return COMMON | fields | SPACES[space] | ENCODERS[encoder]


VARIANTS = [f"{space}-{encoder}" for space in ("hyp", "sph") for encoder in ("vit", "deit", "dino")]
TRAINED = [(dataset, variant) for dataset in DATASETS for variant in VARIANTS]
TRAINED.append(("cars", "hyp-dino-patch8"))
ALL = [(dataset, name + end) for dataset, name in TRAINED for end in ("", ",released")]

# Other losses: their fields of config.objective, as published.
SOFT_TRIPLE = {"name": "soft_triple", "scale": 20.0, "gamma": 0.1, "margin": 0.01, "centres": 10}
MULTI_SIMILARITY = {"name": "multi_similarity", "alpha": 2.0, "beta": 50.0, "base": 0.5}
ARCFACE = {"name": "arcface", "scale": 64.0, "margin": 0.5, "cosine_margin": 0.0}
PUBLISHED_LOSSES = {
    "nca": {"name": "proxy_nca", "temperature": 1.0, "proxy_rate": 1e4},
    "softmax": {"name": "normalized_softmax", "temperature": 0.05, "proxy_rate": 1e4},
    "softtriple": SOFT_TRIPLE | {"regularization": 0.2, "proxy_rate": 1e4},
    "ms": MULTI_SIMILARITY | {"mining": True, "epsilon": 0.1},
    "contrastive": {"name": "contrastive", "margin": 0.5},
    "triplet": {"name": "triplet", "margin": 0.2, "mining": "hard"},
    "supcon": {"name": "supcon", "temperature": 0.1},
    "snca": {"name": "scalable_nca", "temperature": 0.05},
    "arcface": ARCFACE | {"centres": 1, "proxy_rate": 1e4},
    "cosface": {"name": "cosface", "scale": 64.0, "margin": 0.35, "centres": 1, "proxy_rate": 1e4},
    "circle": {"name": "circle", "scale": 80.0, "margin": 0.4},
}
ALONE = {"memory": 0.0, "memory_decay": 0.0, "koleo_weight": 0.0}  # Without IRT's parts.
for own_fields in PUBLISHED_LOSSES.values():
    own_fields |= ALONE if own_fields["name"] in PAIR_LOSSES else {}
    own_fields |= {"proxy_optimizer": "adam"} if "proxy_rate" in own_fields else {}
PROXY_ANCHOR = {"name": "proxy_anchor", "margin": 0.1, "alpha": 32.0, "proxy_rate": 1e4}
PROXY_ANCHOR |= {"proxy_optimizer": "adam"}

# HIER's recipe, which Proxy-Anchor and ResNet-50 share.
HIER = (
    group("model", head="norm_dense", head_dim=384)
    | group("optim", schedule="constant", weight_decay=0.01, eps=1e-4, frozen=("patch_projection",))
    | group("optim", clip_norm=None, clip_value=10.0)
    | group("train", batch_size=180, samples_per_class=2, sampling="drawn_classes")
    | {"data.resize": 256, "train.repeat_images": True}
)
HIER_OBJECTIVE = {
    **{"space": "poincare", **BALL, "hier_weight": 0.5},
    **{"hier_proxies": 512, "hier_neighbors": 20, "hier_triplets": 50},
    **{"hier_margin": 0.1, "hier_temperature": 0.1, "hier_rate": 50.0, "hier_optimizer": "adam"},
}
HIER_RATES = {"vit": 1e-5, "deit": 1e-5, "dino": 5e-6}
# Steps of the whole run, and those through which the encoder stays as it is.
HIER_STEPS = {"cub": (3200, 32), "cars": (4400, 44), "sop": (49500, 1650), "inshop": (21450, 715)}
# Factor of the learning rate of ResNet-50, and the steps after each of which it applies.
RESNET_DECAYS = {"cub": (0.5, 160), "cars": (0.5, 440), "sop": (0.3, 8250), "inshop": (0.3, 2860)}
RESNET = {"optim.schedule": "step", "optim.frozen": ()}
RESNET |= {"model.head_dim": 512, "data.crop_area": (0.08, 1.0), **IMAGENET}
RESNET |= {f"model.{mode}pooling": "avg_max" for mode in ("", "eval_")}


def load(dataset, variant, overrides=()):
    return load_config(f"{dataset}:{variant}", overrides)


@pytest.mark.parametrize(("dataset", "variant"), ALL)
def test_a_recipe_has_the_published_values(dataset, variant):
    fields, expected = flatten(load(dataset, variant)), published(dataset, variant)
    assert {field: fields[field] for field in expected} == expected


@pytest.mark.parametrize("dataset", DATASETS)
def test_another_loss_changes_the_objective_alone(dataset):
    for encoder in ("vit", "deit", "dino"):
        recipe = identity(load(dataset, f"sph-{encoder}"))
        for loss, own in PUBLISHED_LOSSES.items():
            if loss == "softtriple" and dataset in ("sop", "inshop"):
                own = own | {"centres": 2}
            fields = identity(load(dataset, f"{loss}-{encoder}"))
            lists = {name: [*value] for name, value in BALL.items() if isinstance(value, tuple)}
            objective = {"space": "sphere", **BALL, **lists, **own}
            expected = {f: v for f, v in recipe.items() if not f.startswith("objective.")}
            expected |= {f"objective.{field}": value for field, value in objective.items()}
            assert fields == expected | {"variant": f"{loss}-{encoder}"}


@pytest.mark.parametrize("dataset", DATASETS)
@pytest.mark.parametrize("loss", ["hier", "pa", "hyp"])
def test_the_recipe_of_hier_has_the_published_values(dataset, loss):
    steps, start = HIER_STEPS[dataset]
    held, faster = ("encoder", 1.0, None, start), ("head", 100.0, None, 0)
    recipe = HIER | {"train.total_steps": steps, "optim.groups": (held,)}
    if large := dataset in ("sop", "inshop"):
        recipe |= {"optim.weight_decay": 1e-4, "optim.groups": (held, faster)}
    for encoder in ("vit", "deit", "dino", "resnet50"):
        if encoder == "resnet50":
            recipe["optim.groups"] = (held,)
            expected = recipe | RESNET | {"optim.learning_rate": 6e-4 if large else 1e-4}
            expected["optim.decay_factor"], expected["optim.decay_every"] = RESNET_DECAYS[dataset]
            if loss == "hyp":
                expected |= {"train.batch_size": 176, "train.samples_per_class": 8}
        elif loss == "hyp":
            continue
        else:
            expected = recipe | ENCODERS[encoder] | {"optim.learning_rate": HIER_RATES[encoder]}
        config = load(dataset, f"{loss}-{encoder}")
        fields, objective = flatten(config), dict(config.objective)
        assert {field: fields[field] for field in expected} == expected
        if loss == "hier":
            assert objective == PROXY_ANCHOR | HIER_OBJECTIVE | {"name": "hier+proxy_anchor"}
        elif loss == "pa":
            assert objective == PROXY_ANCHOR | {"space": "sphere", **BALL}
        else:
            assert objective["name"] == "pairwise_cross_entropy"
            assert objective["space"] == "poincare" and objective["temperature"] == 0.2


@pytest.mark.parametrize("dataset", DATASETS)
def test_hypmix_changes_the_objective_and_scores_the_head_by_cosine(dataset):
    """As published; In-Shop is not in the paper."""
    own = {"name": "hypmix", "sphere_temperature": 0.05, "ball_temperature": 0.2}
    own |= {"ball_weight": 3.0 if dataset == "cub" else 8.0, "space": "poincare"}
    for encoder in ("vit", "deit", "dino"):
        recipe = identity(load(dataset, f"hyp-{encoder}"))
        recipe.pop("objective.temperature")
        expected = recipe | {f"objective.{field}": value for field, value in own.items()}
        expected |= {"eval.spaces.head": ["sphere", "objective"], "variant": f"mix-{encoder}"}
        assert identity(load(dataset, f"mix-{encoder}")) == expected


@pytest.mark.parametrize("dataset", ["glyphs", "omniglot"])
def test_the_examples_have_the_same_losses(dataset):
    for variant in importlib.import_module(f"configs.{dataset}").VARIANTS:
        validate(load(dataset, variant))
    for loss, own in {"pa": PROXY_ANCHOR, **PUBLISHED_LOSSES}.items():
        expected = {"space": "sphere", **BALL, **own}
        if "proxy_rate" in expected:
            expected["proxy_rate"] = 1.0
        assert dict(load(dataset, loss).objective) == expected


def test_the_default_variant_is_hyp_dino():
    for dataset in DATASETS:
        config = load(dataset, "hyp-dino")
        assert identity(load_config(dataset)) == identity(config)
        assert default_workdir(config, unchanged=config) == f"runs/{dataset}-hyp-dino"


@pytest.mark.parametrize("encoder", ENCODERS)
def test_a_model_has_the_published_sizes(encoder):
    """Checked on Cars, which has every encoder: models do not depend on the dataset."""
    config = load("cars", f"hyp-{encoder}")
    images = jax.ShapeDtypeStruct((2, 224, 224, 3), jnp.float32)
    for pooling, evaluating in (("cls", False), (ENCODERS[encoder]["model.eval_pooling"], True)):
        model = create_embedder(config, evaluating=evaluating)
        outputs, _ = jax.eval_shape(model.init_with_output, jax.random.key(0), images)
        assert outputs.pooled.shape == (2, 384) and outputs.projected.shape == (2, 128)
        assert model.encoder.pooling == pooling


@pytest.mark.parametrize("dataset", [*DATASETS, "folder"])
def test_variants_of_recent_encoders_differ_from_those_of_dino_in_the_encoder(dataset):
    own = {f"model.{name}" for name in ("architecture", "weights", "pooling", "eval_pooling")}
    own |= {f"optim.{name}" for name in ("learning_rate", "layer_decay", "frozen")}
    own |= {"variant", "name", "data.mean", "data.std"}
    path = ["data.path=photos"] if dataset == "folder" else []
    for encoder in variants.RECENT:
        for loss in ("hyp", "sph", "mix", "pa", "hier"):
            config = load_config(f"{dataset}:{loss}-{encoder}", path)
            validate(config)
            scaling = published_weights(config.model.weights)
            assert (config.data.mean, config.data.std) == (scaling.mean, scaling.std)
            assert config.model.pooling in create_encoder(config.model.architecture).poolings
            if loss in ("hyp", "sph"):
                dino = flatten(load_config(f"{dataset}:{loss}-dino", path))
                fields = flatten(config).items()
                assert {name for name, value in fields if dino[name] != value} <= own


@pytest.mark.parametrize("dataset", [*DATASETS, "grocery"])
def test_a_frozen_encoder_leaves_the_loss_and_changes_how_a_head_is_trained(dataset):
    """Apart from temperature and rates; the recipes of HIER and IRT are not followed then."""
    names = ("proxy_rate", "hier_rate", "hier_proxies", "hier_triplets", "temperature")
    own_of_heads = {f"objective.{name}" for name in names}
    for loss in ("hyp", "sph", "mix", "pa", "ms", "hier", "hyp+hier", "irt-l", "irt-r"):
        config = load(dataset, f"{loss}-lite,frozen")
        assert config.train.cached_features and config.optim.frozen == ("encoder",)
        assert config.train.batch_size is config.train.samples_per_class is None
        assert config.model.head == "dense" and config.model.head_dim == 1280
        alone = flatten(load(dataset, f"{loss}-lite"))
        own = {f: v for f, v in flatten(config).items() if f.startswith("objective.")}
        assert {field for field, value in own.items() if alone[field] != value} <= own_of_heads
    assert alone["objective.koleo_weight"] == 0.7 and alone["objective.memory"] == 1.0
    assert config.objective.space == "sphere"


@pytest.mark.parametrize(("encoder", "block"), [("lite", "stage_4_block_2"), ("dinov2", "block_9")])
def test_last_blocks_are_trained_as_a_head_alone_is_but_faster(encoder, block):
    for dataset in (*DATASETS, "grocery"):
        last, alone = (load(dataset, f"hyp-{encoder},{name}") for name in ("last", "frozen"))
        fields = flatten(alone)
        changed = {field for field, value in flatten(last).items() if fields[field] != value}
        own = {"variant", "optim.frozen", "optim.learning_rate", "optim.groups"}
        assert changed == own
    last, alone = (load("grocery", f"hier-{encoder},{name}") for name in ("last", "frozen"))
    for field in ("proxy_rate", "hier_rate"):  # The rates of proxies are the same.
        rates = (c.objective[field] * c.optim.learning_rate for c in (last, alone))
        np.testing.assert_allclose(*rates)
    model = create_embedder(last)
    shapes = {"model": model_shapes(model, View.of(last.data))}
    trained, _ = split_frozen(shapes, last.optim.frozen)
    assert highest_frozen(model.encoder, trained["model"]["encoder"]) == block
