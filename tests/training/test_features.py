"""A head that is trained on features in a file."""

import dataclasses

import numpy as np
import pytest

from hypjax import train
from hypjax.assemble import assemble_training
from hypjax.config import load_config
from hypjax.errors import UserError
from hypjax.geometry import Sphere
from hypjax.retrieval import graded_scores, recall_at_k
from hypjax.training.input import training_features
from hypjax.training.states import random_state
from tests.helpers import small_runs
from tests.helpers.pictures import write_squares

CONFIG = str(small_runs.REPOSITORY / "configs/features.py")
FIELDS = small_runs.SHORT_FEATURES


@pytest.fixture(scope="module")
def squares(tmp_path_factory):
    return write_squares(tmp_path_factory.mktemp("squares"), 16)


@pytest.fixture(scope="module")
def file(squares, tmp_path_factory):
    """The features of all squares by a frozen encoder of random weights."""
    built = assemble_training(small_runs.load(squares, *FROZEN))
    train = built.images
    labels = np.repeat(np.arange(12), 4)
    names = np.array([f"{squares}/{name}/{i}.png" for name in "abcdefghijkl" for i in range(4)])
    columns = {"positions": np.arange(48), "labels": labels, "sizes": np.full((48, 2), 16)}
    everything = dataclasses.replace(train, names=names, **columns)
    embedder = dataclasses.replace(built.experiment.embedder, cached=())
    experiment = dataclasses.replace(built.experiment, embedder=embedder)
    built = dataclasses.replace(built, experiment=experiment, images=everything)
    params = random_state(built.learner, built.sizes).params["model"]
    path = tmp_path_factory.mktemp("features") / "features.npz"
    classes = np.array(list("abcdefghijkl"))[labels]
    np.savez(path, features=training_features(built, params), labels=classes, ids=names)
    return path


FROZEN = ("optim.frozen=encoder", "train.cached_features=True", *FIELDS)


def load(path, *overrides):
    head = "model.head_init=orthogonal", "model.head_dim=8", "optim.schedule=constant"
    return load_config(CONFIG, [*FIELDS, *head, f"data.path={path}", *overrides])


@pytest.mark.slow
def test_its_steps_and_scores_are_those_on_a_frozen_encoder_with_these_features(
    squares, file, tmp_path
):
    rates = "optim.schedule=constant", "model.head_dim=8", "objective.temperature=0.1"
    runs = {"frozen": small_runs.load(squares, *FROZEN, *rates), "given": load(file)}
    frozen, given = (train.train_and_evaluate(x, tmp_path / name) for name, x in runs.items())
    expected, actual = (small_runs.step_metrics(tmp_path / name) for name in runs)
    assert expected.keys() == actual.keys() and len(actual) >= 6
    for step, values in expected.items():
        np.testing.assert_allclose(actual[step], values, rtol=1e-5)
    assert given == frozen


@pytest.mark.slow
def test_splits_of_a_file_are_kept_and_head_sizes_follow_the_features(file, tmp_path):
    given = dict(np.load(file))
    splits = np.where(given["labels"] < "i", "train", "test")
    path = tmp_path / "split.npz"
    np.savez(path, **given, splits=splits, coarse_labels=(given["labels"] < "f").astype(int))
    fields = [*FIELDS, "objective.name=cones+pairwise_cross_entropy", "data.validation_classes=2"]
    built = assemble_training(load_config(CONFIG, [*fields, f"data.path={path}"]))
    assert built.learner.model.head_dim == built.learner.model.encoder.dim == 16
    assert (splits[built.experiment.splits.test.positions] == "test").all()
    assert len(built.images) + len(built.experiment.splits.validation) == 32
    assert {*built.images.coarse_labels, *built.experiment.splits.test.coarse_labels} == {"0", "1"}
    images, coarse = built.images, np.array(built.sizes.coarse_labels[0])
    assert len(coarse) == built.sizes.classes == images.num_classes
    np.testing.assert_array_equal(coarse[images.labels], images.coarse_labels.astype(int))
    with pytest.raises(UserError, match="needs coarse classes"):
        assemble_training(load_config(CONFIG, [*fields, f"data.path={file}"]))
    random = random_state(built.learner, built.sizes).params["model"]
    scores = built.experiment.test_scores(random)
    test = given["labels"] >= "i"

    points = np.asarray(Sphere().embed(given["features"][test]))
    expected = recall_at_k(points, given["labels"][test], ks=(1, 2), space=Sphere())
    levels = [column[test] for column in (given["labels"], given["labels"] < "f")]
    graded = graded_scores(points, [x.astype(str) for x in levels], space=Sphere())
    graded = {name: values.mean() for name, values in graded.items()}
    assert scores["encoder"] == {f"recall@{k}": x for k, x in expected.items()} | graded
    assert list(built.experiment.validation_scores(random)["head"]) == ["recall@1", "recall@2"]
