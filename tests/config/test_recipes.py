"""The configurations of the benchmarks: values of the papers and of the released code.

None of these values comes from hypjax.config.recipes.
"""

import math

import pytest

from hypjax.config import flatten, load_config, variants
from hypjax.config.settings import model_settings
from hypjax.errors import UserError
from hypjax.models import create_embedder, create_encoder, model_shapes
from hypjax.models.architectures import published_weights
from hypjax.models.split_at_block import highest_frozen
from hypjax.train import train_and_evaluate
from hypjax.training.optim import split_frozen


def group(name, /, **fields):
    """Fields of a group by their whole names."""
    return {f"{name}.{field}": value for field, value in fields.items()}


IMAGENET = group("data", mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
HALVES = group("data", mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
BALL = group("objective", c=0.1, learn_c=False, clip_radius=2.3, feature_scale=1.0)
COMMON = (
    {"seed": 0, **BALL}
    | group("data", path=None, channels=3, image_size=224, flip=0.5, validation_classes=0.0)
    | group("data", crop_area=(0.2, 1.0), crop_ratio=(0.75, 4 / 3))
    | group("model", pooling="cls", head_dim=128, precision="auto")
    | group("optim", schedule="constant", warmup_steps=0, weight_decay=0.01, clip_norm=3.0)
    | group("optim", b1=0.9, b2=0.999, eps=1e-8, frozen=("patch_projection",), gradient_factor=1.0)
    | group("train", on_nonfinite="stop")
    | group("eval", metrics=("recall",), every=0)
)
# Architecture, weights, pooling in evaluation, learning rate, and scaling of pixels.
ENCODERS = {
    "vit": ("vit_small_patch16_224", "augreg_in21k_ft_in1k", "cls", 3e-5, HALVES),
    "deit": ("deit_small_distilled_patch16_224", "fb_in1k", "cls_dist_mean", 3e-5, IMAGENET),
    "dino": ("vit_small_patch16_224", "dino", "cls", 1e-5, IMAGENET),
    "dino-patch8": ("vit_small_patch8_224", "dino", "cls", 1e-5, IMAGENET),
}
# Dataset name, shorter side of the test view, K, batch size, samples per class, and the number of
# steps in the paper and in the released commands.
DATASETS = {
    "cub": ("cub200", 256, (1, 2, 4, 8), 900, 9, (200, 50)),
    "cars": ("cars196", 224, (1, 2, 4, 8), 882, 9, (600, 300)),
    "sop": ("sop", 224, (1, 10, 100, 1000), 900, 2, (25_000, 5_000)),
    "inshop": ("inshop", 224, (1, 10, 20, 30), 900, 2, (2_200, 3_200)),
}
# Fields of config.objective: Hyp-ViT's on the ball and on the sphere, HypMix's, and others'.
PAIRS = {"name": "pairwise_cross_entropy", "temperature": 0.2, "pair_weight": 1.0}
MIX = {"name": "hypmix", "sphere_temperature": 0.05, "ball_temperature": 0.2}
PROXIES = {"proxy_rate": 1e4, "proxy_optimizer": "adam"}
PROXY_ANCHOR = {"name": "proxy_anchor", "margin": 0.1, "alpha": 32.0, **PROXIES}
SOFT_TRIPLE = {"name": "soft_triple", "scale": 20.0, "gamma": 0.1, "margin": 0.01}
ALONE = {"memory": 0.0, "memory_decay": 0.0, "koleo_weight": 0.0}  # Without IRT's parts.
LOSSES = {
    "hyp": PAIRS | {"space": "poincare"},
    "sph": PAIRS,
    "mix": MIX | {"ball_weight": 8.0, "space": "poincare"},
    "nca": {"name": "proxy_nca", "temperature": 1.0, **PROXIES},
    "softmax": {"name": "normalized_softmax", "temperature": 0.05, **PROXIES},
    "softtriple": {**SOFT_TRIPLE, "centres": 10, "regularization": 0.2, **PROXIES},
    "ms": {"name": "multi_similarity", "alpha": 2.0, "beta": 50.0, "base": 0.5, **ALONE}
    | {"mining": True, "epsilon": 0.1},
    "contrastive": {"name": "contrastive", "margin": 0.5, **ALONE},
    "triplet": {"name": "triplet", "margin": 0.2, "mining": "hard", **ALONE},
    "supcon": {"name": "supcon", "temperature": 0.1, **ALONE},
    "snca": {"name": "scalable_nca", "temperature": 0.05},
    "arcface": {"name": "arcface", "scale": 64.0, "margin": 0.5, "cosine_margin": 0.0}
    | {"centres": 1, **PROXIES},
    "cosface": {"name": "cosface", "scale": 64.0, "margin": 0.35, "centres": 1, **PROXIES},
    "circle": {"name": "circle", "scale": 80.0, "margin": 0.4, **ALONE},
}
# HIER's recipe, which Proxy-Anchor and ResNet-50 share.
HIER = (
    {"data.resize": 256, "train.repeat_images": True, **BALL}
    | group("model", head="norm_dense", head_dim=384)
    | group("optim", schedule="constant", weight_decay=0.01, eps=1e-4, frozen=("patch_projection",))
    | group("optim", clip_norm=None, clip_value=10.0, gradient_factor=0.5)
    | group("train", batch_size=180, samples_per_class=2, sampling="drawn_classes")
)
HIER_OBJECTIVE = PROXY_ANCHOR | {
    **{"name": "hier+proxy_anchor", "space": "poincare", "hier_weight": 0.5},
    **{"hier_proxies": 512, "hier_neighbors": 20, "hier_triplets": 50},
    **{"hier_margin": 0.1, "hier_temperature": 0.1, "hier_rate": 50.0, "hier_optimizer": "adam"},
}
HIER_RATES = {"vit": 1e-5, "deit": 1e-5, "dino": 5e-6}
# Steps of the whole run, and those through which the encoder stays as it is; of ResNet-50, the
# factor of the learning rate, and the steps after each of which it applies.
HIER_STEPS = {
    "cub": (3200, 32, (0.5, 160)),
    "cars": (4400, 44, (0.5, 440)),
    "sop": (49500, 1650, (0.3, 8250)),
    "inshop": (21450, 715, (0.3, 2860)),
}
RESNET = {"optim.schedule": "step", "optim.frozen": (), "data.crop_area": (0.08, 1.0), **IMAGENET}
RESNET |= group("model", head_dim=512, pooling="avg_max", eval_pooling="avg_max")


def of_encoder(encoder):
    architecture, weights, pooling, rate, scaling = ENCODERS[encoder]
    model = {"architecture": architecture, "weights": f"{architecture}.{weights}"}
    return group("model", eval_pooling=pooling, **model) | {"optim.learning_rate": rate} | scaling


def of_objective(**fields):
    return group("objective", **{"space": "sphere"} | fields)


def hyp_vit_recipes(dataset):
    """Recipes of Hyp-ViT's protocol, with any loss and encoder."""
    name, resize, ks, batch_size, samples, steps = DATASETS[dataset]
    common = COMMON | group("data", name=name, resize=resize) | {"eval.ks": ks}
    sizes = {"batch_size": batch_size, "samples_per_class": samples}
    for loss, own in LOSSES.items():
        objective = of_objective(**own)
        if loss == "mix":
            objective["eval.spaces.head"] = "sphere", "objective"
            objective["objective.ball_weight"] = 3.0 if dataset == "cub" else 8.0
        if loss == "softtriple" and dataset in ("sop", "inshop"):
            objective["objective.centres"] = 2
        encoders = [*ENCODERS] if loss == "hyp" and dataset == "cars" else [*ENCODERS][:3]
        for encoder in encoders if loss in ("hyp", "sph", "mix") else ["dino"]:
            if encoder == "dino-patch8":
                sizes = {"batch_size": 120, "samples_per_class": 2}
            released = loss in ("hyp", "sph") or (loss, dataset) == ("mix", "cub")
            for i, end in enumerate(("", ",released") if released else ("",)):
                train = group("train", total_steps=steps[i], **sizes)
                recipe = common | objective | of_encoder(encoder) | train
                yield f"{loss}-{encoder}{end}", recipe
        sizes = {"batch_size": batch_size, "samples_per_class": samples}


def hier_recipes(dataset):
    """Recipes of HIER's protocol."""
    steps, start, decay = HIER_STEPS[dataset]
    held, faster = ("encoder", 1.0, None, start), ("head", 100.0, None, 0)
    common = HIER | {"train.total_steps": steps, "optim.groups": (held,)}
    if large := dataset in ("sop", "inshop"):
        common["optim.weight_decay"] = 1e-4
    resnet = common | RESNET | {"optim.learning_rate": 6e-4 if large else 1e-4}
    resnet |= group("optim", decay_factor=decay[0], decay_every=decay[1])
    common |= {"optim.groups": (held, faster)} if large else {}
    for loss, own in (("hier", HIER_OBJECTIVE), ("pa", PROXY_ANCHOR)):
        yield f"{loss}-resnet50", resnet | of_objective(**own)
        for encoder, rate in HIER_RATES.items():
            recipe = common | of_encoder(encoder) | of_objective(**own)
            yield f"{loss}-{encoder}", recipe | {"optim.learning_rate": rate}
    sizes = group("train", batch_size=176, samples_per_class=8)
    for loss in ("hyp", "sph"):
        own = of_objective(**LOSSES[loss] | {"pair_weight": 1 / 64})
        yield f"{loss}-resnet50", resnet | sizes | own
    batches = group("train", batch_size=DATASETS[dataset][3], total_steps=DATASETS[dataset][5][0])
    pooled = group("model", pooling="avg", eval_pooling="avg", head_dim=128)
    plain = {"optim.frozen": (), **IMAGENET}
    for loss in ("hyp", "sph"):
        followed = COMMON | pooled | plain | batches | of_objective(**LOSSES[loss])
        yield f"{loss}-resnet50,hyp-vit", followed
    moco = of_objective(name="supcon", temperature=0.1, space="poincare", memory_decay=0.999)
    yield "moco-dino", moco | batches | {"objective.memory_only": True}
    changes = group("data", colour_jitter=(0.4, 0.4, 0.4, 0.1), grey=0.2, blur=0.5)
    yield "hyp-dino,unlabelled", changes | group("train", unlabelled=True, samples_per_class=2)


def irt_recipes(dataset):
    """Recipes of IRT for categories, of the paper, and where it has none, of unofficial code."""
    steps, inshop = {"cub": 2_000}.get(dataset, 35_000), dataset == "inshop"
    memory = {"memory": 0.2 if inshop else 1.0, "memory_decay": 0.999 if inshop else 0.0}
    names = {"irt-l": (0.0, steps), "irt-r": (0.7, steps), "irt-r-distilled": (0.7, steps)}
    resnet = {"model.architecture": "resnet50", "model.pooling": "avg", "model.drop_path": 0.0}
    yield "irt-r-resnet50", resnet | {"objective.koleo_weight": 0.7, "train.batch_size": 64}
    for name, (weight, steps) in (names | {"irt-o": (0.0, 0)}).items():
        kind = f"deit_small{'_distilled' * name.endswith('distilled')}_patch16_224"
        yield (
            name,
            of_objective(name="contrastive", margin=0.5, koleo_weight=weight, **memory)
            | group("model", architecture=kind, weights=f"{kind}.fb_in1k", pooling="cls")
            | group("model", eval_pooling="cls", head="none", drop_path=0.1)
            | group("optim", name="adamw", schedule="constant", learning_rate=3e-5, frozen=())
            | group("optim", weight_decay=5e-4, clip_norm=None, clip_value=None)
            | group("data", train_view="resize_crop", test_view="centre_crop", resize=256)
            | group("data", image_size=224, flip=0.5)
            | group("train", batch_size=64, samples_per_class=2, total_steps=steps)
            | {"train.sampling": "shuffled" if dataset == "cub" else "drawn_classes", **IMAGENET},
        )


SFM = (
    group("data", name="sfm120k", train_view="resize_crop", test_view="squash", flip=0.0)
    | group("data", image_size=224, resize=224)
    | group("model", architecture="deit_small_patch16_224", pooling="cls", eval_pooling="cls")
    | group("model", weights="deit_small_patch16_224.fb_in1k", head="none", drop_path=0.0)
    | of_objective(name="tuple_contrastive", margin=0.85, koleo_weight=4.0)
    | group("optim", name="adam", learning_rate=5e-7, schedule="step", decay_every=400)
    | group("optim", decay_factor=math.exp(-0.01), warmup_steps=0, clip_norm=None, frozen=())
    | group("optim", weight_decay=2e-7)  # 1e-6 for the sum of a batch's five tuples.
    | group("train", sampling="tuples", batch_size=35, total_steps=40_000)
    | group("train.tuples", pairs=2_000, negatives=5, pool=22_000)
    | group("eval", benchmarks=("roxford5k", "rparis6k"), ks=(1, 5, 10), scales=(1.0,))
    | {"eval.expansion": 0, "eval.rerank": False, **IMAGENET}
)


def sfm_recipes():
    """Recipes of IRT for particular objects."""
    yield "irt-r-deit-s", SFM
    yield "irt-l-deit-s", SFM | {"objective.koleo_weight": 0.0}
    untrained = {"train.total_steps": 0, "data.name": "roxford5k"}
    untrained |= {"objective.koleo_weight": 0.0, "eval.benchmarks": ("rparis6k",)}
    yield "irt-o-deit-s", SFM | untrained
    yield "hyp-deit-s", SFM | {"objective.space": "poincare", "objective.margin": 4.0}
    for side, end in ((224, ""), (384, "-384"), (384, "-384-distilled")):
        kind = f"deit_base{'_distilled' * end.endswith('distilled')}_patch16_{side}"
        model = group("model", architecture=kind, weights=f"{kind}.fb_in1k")
        yield f"irt-r-deit-b{end}", SFM | model | group("data", image_size=side, resize=side)


@pytest.mark.parametrize("dataset", [*DATASETS, "sfm"])
def test_recipes_have_the_published_values(dataset):
    if dataset == "sfm":
        recipes = [*sfm_recipes(), ("", SFM)]
    else:
        recipes = [*hyp_vit_recipes(dataset), *hier_recipes(dataset)]
        recipes += irt_recipes(dataset) if dataset != "cars" else ()
        assert load_config(dataset) == load_config(f"{dataset}:hyp-dino")
    for variant, expected in recipes:
        fields = flatten(load_config(f"{dataset}:{variant}" if variant else dataset))
        assert {name: fields[name] for name in expected} == expected, variant


def test_an_encoder_that_is_only_evaluated_is_not_trained(tmp_path):
    with pytest.raises(UserError, match="--mode=evaluate"):
        train_and_evaluate(load_config("sop:irt-o"), tmp_path / "run")


def differing(a, b):
    """Fields in which two variants of a dataset differ."""
    a, b = (flatten(load_config(spec)) for spec in (a, b))
    return {name for name, value in a.items() if b.get(name, ()) != value}


@pytest.mark.parametrize("dataset", ["cub", "sop"])
def test_variants_of_recent_encoders_differ_from_those_of_dino_in_the_encoder(dataset):
    own = {f"model.{name}" for name in ("architecture", "weights", "pooling", "eval_pooling")}
    own |= {f"optim.{name}" for name in ("learning_rate", "layer_decay", "frozen")}
    own |= {"variant", "name", "data.mean", "data.std"}
    for encoder in variants.RECENT:
        config = load_config(f"{dataset}:hyp-{encoder}")
        scaling = published_weights(config.model.weights)
        assert (config.data.mean, config.data.std) == (scaling.mean, scaling.std)
        assert config.model.pooling in create_encoder(config.model.architecture).poolings
        assert differing(f"{dataset}:hyp-{encoder}", f"{dataset}:hyp-dino") <= own


@pytest.mark.parametrize("dataset", ["cub", "sop", "grocery"])
def test_a_frozen_encoder_leaves_the_loss_and_changes_how_a_head_is_trained(dataset):
    names = ("proxy_rate", "hier_rate", "hier_proxies", "hier_triplets", "temperature")
    own_of_heads = {f"objective.{name}" for name in names}
    for loss in ("hyp", "sph", "mix", "pa", "ms", "hier", "hyp+hier", "irt-r"):
        spec = f"{dataset}:{loss}-lite"
        config = load_config(f"{spec},frozen")
        assert config.train.cached_features and config.optim.frozen == ("encoder",)
        assert config.train.batch_size is config.train.samples_per_class is None
        assert config.model.head == "dense" and config.model.head_dim == 1280
        changed = differing(f"{spec},frozen", spec)
        assert {field for field in changed if field.startswith("objective.")} <= own_of_heads


@pytest.mark.parametrize("loss", ["hyp", "sph", "mix"])
def test_a_small_encoder_is_fine_tuned_as_its_last_blocks_are_but_on_photographs(loss):
    own = {"variant", "data.image_size", "data.resize", "optim.frozen", "optim.warmup_steps"}
    changed = "cached_features", "batch_size", "samples_per_class", "total_steps"
    own |= {f"train.{field}" for field in changed}
    spec = f"grocery:{loss}-lite"
    assert differing(spec, f"{spec},last") == own
    train = load_config(spec).train
    assert train.batch_size * train.total_steps < 10_000  # Minutes on a CPU.


@pytest.mark.parametrize(
    ("encoder", "block"),
    [
        ("lite", "stage_4_block_2"),
        ("dinov2", "block_9"),
        ("dinov2-large", "block_21"),
        ("dinov2-giant", "block_37"),
    ],
)
def test_last_blocks_are_trained_as_a_head_alone_is_but_faster(encoder, block):
    own = {"variant", "optim.frozen", "optim.learning_rate", "optim.groups"}
    last, alone = (f"grocery:hyp-{encoder},{name}" for name in ("last", "frozen"))
    assert differing(last, alone) == own
    last = load_config(last)
    model = create_embedder(model_settings(last))
    shapes = {"model": model_shapes(model, model_settings(last).encoder.view)}
    trained, _ = split_frozen(shapes, last.optim.frozen)
    assert highest_frozen(model.encoder, trained["model"]["encoder"]) == block
