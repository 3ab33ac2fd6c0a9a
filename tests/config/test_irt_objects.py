"""The recipe of IRT for particular objects, number by number."""

import math

import pytest

from hypjax.config import flatten, load_config
from hypjax.config.irt_objects import VARIANTS
from hypjax.errors import UserError

RECIPE = {
    "data.name": "sfm120k",
    "data.image_size": 224,
    "data.resize": 224,
    "data.train_view": "resize_crop",
    "data.test_view": "squash",
    "data.flip": 0.0,
    "data.mean": (0.485, 0.456, 0.406),
    "data.std": (0.229, 0.224, 0.225),
    "model.architecture": "deit_small_patch16_224",
    "model.weights": "deit_small_patch16_224.fb_in1k",
    "model.pooling": "cls",
    "model.eval_pooling": "cls",
    "model.head": "none",
    "model.drop_path": 0.0,
    "objective.name": "tuple_contrastive",
    "objective.space": "sphere",
    "objective.margin": 0.85,
    "objective.koleo_weight": 4.0,
    "optim.name": "adam",
    "optim.learning_rate": 5e-7,
    "optim.schedule": "step",
    "optim.decay_every": 400,
    "optim.decay_factor": math.exp(-0.01),
    "optim.warmup_steps": 0,
    "optim.weight_decay": 2e-5,  # 1e-4 for the sum of a batch's five tuples.
    "optim.clip_norm": None,
    "optim.frozen": (),
    "train.sampling": "tuples",
    "train.tuples.pairs": 2_000,
    "train.tuples.negatives": 5,
    "train.tuples.pool": 22_000,
    "train.batch_size": 35,
    "train.total_steps": 40_000,
    "eval.benchmarks": ("roxford5k", "rparis6k"),
    "eval.ks": (1, 5, 10),
    "eval.scales": (1.0,),
    "eval.expansion": 0,
    "eval.rerank": False,
}


@pytest.fixture
def load(repository):
    def load(file, variant, *fields):
        return load_config(f"{repository}/configs/{file}.py:{variant}", list(fields))

    return load


def test_the_default_is_the_recipe(repository):
    fields = flatten(load_config(f"{repository}/configs/sfm.py"))
    assert {field: fields[field] for field in RECIPE} == RECIPE


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


@pytest.mark.parametrize("variant", DIFFERENCES)
def test_variants_differ_in_nothing_else(load, variant):
    fields = flatten(load("sfm", variant))
    assert {field: fields[field] for field in RECIPE} == RECIPE | DIFFERENCES[variant]


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_is_valid(load, variant):
    assert load("sfm", variant).variant == variant


@pytest.mark.parametrize("variant", ["irt-o", "irt-l", "irt-r", "hyp"])
def test_scenes_are_tuned_with_the_same_loss(load, variant):
    small, large = load("scenes", variant), load("sfm", f"{variant}-deit-s")
    for field in ("objective.name", "objective.space", "objective.margin", "train.sampling"):
        assert flatten(small)[field] == flatten(large)[field]
    assert bool(small.objective.koleo_weight) == bool(large.objective.koleo_weight)


def test_an_unknown_variant_is_refused(load):
    with pytest.raises(UserError, match="unknown variant 'irt-r-deit'; did you mean irt-r-deit-s"):
        load("sfm", "irt-r-deit")


@pytest.mark.parametrize(
    "fields",
    [
        ("eval.benchmarks=('cub200',)",),
        ("eval.benchmarks=('roxford5k','roxford5k')",),
        ("train.tuples.pool=0",),
        ("train.batch_size=36",),
        ("objective.name=pairwise_cross_entropy",),
        ("train.sampling=epoch_classes",),
    ],
)
def test_wrong_fields_are_refused(load, fields):
    with pytest.raises(UserError, match=f"config.{fields[0].partition('=')[0]}|train.sampling"):
        load("sfm", "irt-r-deit-s", *fields)
