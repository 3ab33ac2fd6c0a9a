"""The recipe of IRT."""

import pytest

from hypjax.config import flatten, load_config
from hypjax.errors import UserError
from hypjax.train import train_and_evaluate

STEPS = {"cub": 2_000, "sop": 35_000, "inshop": 35_000}


@pytest.fixture
def load(repository):
    def load(dataset, variant):
        return load_config(f"{repository}/configs/{dataset}.py:{variant}", [])

    return load


@pytest.mark.parametrize("dataset", STEPS)
def test_the_recipe_of_irt_has_its_values(load, dataset):
    """Those of the paper, and where it has none, of unofficial code."""
    for name, weight in (("irt-l", 0.0), ("irt-r", 0.7), ("irt-r-distilled", 0.7)):
        config = load(dataset, name)
        assert config.objective.to_dict() == {
            **{"name": "contrastive", "space": "sphere", "c": 0.1, "clip_radius": 2.3},
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


def test_irt_has_no_recipe_for_cars(load):
    with pytest.raises(UserError, match="unknown variant 'irt-r'"):
        load("cars", "irt-r")


def test_an_encoder_that_is_only_evaluated_is_not_trained(load, tmp_path):
    with pytest.raises(UserError, match="total_steps is 0; add --mode=evaluate to evaluate wi"):
        train_and_evaluate(load("sop", "irt-o"), tmp_path / "run")
    assert not (tmp_path / "run").exists()
