"""The recipes of IRT, for categories and for particular objects, number by number."""

import math

import pytest

from hypjax.config import flatten, load_config
from hypjax.errors import UserError
from hypjax.training.train import train_and_evaluate
from tests.config.test_recipes import BALL, group

STEPS = {"cub": 2_000, "sop": 35_000, "inshop": 35_000}


def load(file, variant, *fields):
    return load_config(f"{file}:{variant}", fields)


@pytest.mark.parametrize("dataset", STEPS)
def test_the_recipe_of_irt_has_its_values(dataset):
    """Those of the paper, and where it has none, of unofficial code."""
    for name, weight in (("irt-l", 0.0), ("irt-r", 0.7), ("irt-r-distilled", 0.7)):
        config = load(dataset, name)
        assert config.objective.to_dict() == {
            **{"name": "contrastive", "space": "sphere", **BALL},
            **{"margin": 0.5, "koleo_weight": weight},
            "memory": 0.2 if dataset == "inshop" else 1.0,
            "memory_decay": 0.999 if dataset == "inshop" else 0.0,
        }
        kind = "deit_small_distilled" if name.endswith("distilled") else "deit_small"
        model, data, optim, train = config.model, config.data, config.optim, config.train
        assert model.architecture == f"{kind}_patch16_224"
        assert model.weights == f"{kind}_patch16_224.fb_in1k"
        assert (model.pooling, model.eval_pooling, model.head) == ("cls", "cls", "none")
        assert (model.drop_path, optim.name, optim.schedule) == (0.1, "adamw", "constant")
        assert (data.train_view, data.test_view) == ("resize_crop", "centre_crop")
        assert (data.resize, data.image_size, data.flip) == (256, 224, 0.5)
        assert data.mean == (0.485, 0.456, 0.406) and data.std == (0.229, 0.224, 0.225)
        assert (optim.learning_rate, optim.weight_decay) == (3e-5, 5e-4)
        assert (optim.clip_norm, optim.clip_value, optim.frozen) == (None, None, ())
        assert (train.batch_size, train.samples_per_class) == (64, 2)
        assert train.sampling == ("shuffled" if dataset == "cub" else "drawn_classes")
        assert train.total_steps == STEPS[dataset]
    changed = {"train.total_steps": 0, "objective.koleo_weight": 0.0, "variant": "irt-o"}
    fields = flatten(load(dataset, "irt-r")) | changed
    assert flatten(load(dataset, "irt-o")) == fields


def test_an_encoder_that_is_only_evaluated_is_not_trained(tmp_path):
    with pytest.raises(UserError, match="--mode=evaluate"):
        train_and_evaluate(load("sop", "irt-o"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


RECIPE = (
    group("data", name="sfm120k", train_view="resize_crop", test_view="squash", flip=0.0)
    | group("data", image_size=224, resize=224)
    | group("data", mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
    | group("model", architecture="deit_small_patch16_224", pooling="cls", eval_pooling="cls")
    | group("model", weights="deit_small_patch16_224.fb_in1k", head="none", drop_path=0.0)
    | group("objective", name="tuple_contrastive", space="sphere", margin=0.85, koleo_weight=4.0)
    | group("optim", name="adam", learning_rate=5e-7, schedule="step", decay_every=400)
    | group("optim", decay_factor=math.exp(-0.01), warmup_steps=0, clip_norm=None, frozen=())
    | group("optim", weight_decay=2e-5)  # 1e-4 for the sum of a batch's five tuples.
    | group("train", sampling="tuples", batch_size=35, total_steps=40_000)
    | group("train.tuples", pairs=2_000, negatives=5, pool=22_000)
    | group("eval", benchmarks=("roxford5k", "rparis6k"), ks=(1, 5, 10), scales=(1.0,))
    | group("eval", expansion=0, rerank=False)
)


DIFFERENCES = {
    "irt-l-deit-s": {"objective.koleo_weight": 0.0},
    "irt-r-deit-b": {
        "model.architecture": "deit_base_patch16_224",
        "model.weights": "deit_base_patch16_224.fb_in1k",
    },
    "irt-r-deit-b-384": {
        "model.architecture": "deit_base_patch16_384",
        "model.weights": "deit_base_patch16_384.fb_in1k",
        "data.image_size": 384,
        "data.resize": 384,
    },
    "irt-o-deit-s": {
        "objective.koleo_weight": 0.0,
        "train.total_steps": 0,
        "data.name": "roxford5k",
        "eval.benchmarks": ("rparis6k",),
    },
    "hyp-deit-s": {"objective.space": "poincare", "objective.margin": 4.0},
}


def test_variants_differ_in_nothing_else():
    for variant, differences in {"": {}, **DIFFERENCES}.items():
        fields = flatten(load("sfm", variant) if variant else load_config("sfm"))
        assert {field: fields[field] for field in RECIPE} == RECIPE | differences


@pytest.mark.parametrize("variant", ["irt-o", "irt-l", "irt-r", "hyp"])
def test_scenes_are_tuned_with_the_same_loss(variant):
    small, large = load("scenes", variant), load("sfm", f"{variant}-deit-s")
    for field in ("objective.name", "objective.space", "objective.margin", "train.sampling"):
        assert flatten(small)[field] == flatten(large)[field]
    assert bool(small.objective.koleo_weight) == bool(large.objective.koleo_weight)
