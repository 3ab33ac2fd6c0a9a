"""Batches and schedules that fit the user's own images."""

import dataclasses
import json
import shlex

import numpy as np
import pytest

from hypjax import train
from hypjax.config import load_config, validate
from hypjax.data.parts import Splits
from hypjax.errors import UserError
from hypjax.runs.workdir import saved_config
from hypjax.training import setup
from hypjax.training.setup import fit_to_images
from tests.helpers import small_runs
from tests.helpers.pictures import dataset_without_images


def images(*sizes):
    return dataset_without_images(np.repeat(np.arange(len(sizes)), sizes))


def fitted(train, *overrides, test=None):
    test = dataset_without_images([100, 100, 101, 101]) if test is None else test
    config = load_config("folder:hyp-scratch", ["data.path=photos", *overrides])
    validate(config)
    config = fit_to_images(config, Splits(train, None, test, None, fingerprint=""))
    validate(config)
    return config


@pytest.mark.parametrize(
    ("sizes", "classes", "samples", "steps"),
    [
        ([20] * 100, 16, 4, 1000),
        ([60, 60], 2, 32, 1000),
        ([50] * 7, 7, 9, 1016),
        ([1] * 90, 32, 2, 1000),
    ],
)
def test_a_batch_has_about_64_images_and_training_64000(sizes, classes, samples, steps):
    """Or fewer in a batch, if there are no more. A tenth of the steps warms up."""
    config = fitted(images(*sizes))
    assert config.train.batch_size == classes * samples
    assert config.train.samples_per_class == samples
    assert (config.train.total_steps, config.optim.warmup_steps) == (steps, steps // 10)


def test_a_head_of_principal_components_sees_each_image_25_times_if_classes_suffice():
    pca = ("model.head_init=pca", "model.weights=none.safetensors")
    assert fitted(images(*[20] * 8), *pca).train.total_steps == 10  # The encoder is trained, too.
    pca += ("optim.frozen=encoder",)
    assert fitted(images(*[20] * 8), *pca).train.total_steps == 63
    few = fitted(images(*[20] * 7), *pca)
    assert few.train.total_steps == few.optim.warmup_steps == 1  # From the rate 0: unchanged.
    photos = images(*[20] * 7)
    for fields in ((), ("data.split=images",)):  # The same classes, whoever split the images.
        assert fitted(photos, *pca, *fields, test=photos).train.total_steps > 20


@pytest.mark.parametrize(
    ("splits", "fields"),
    [
        (None, ("--config.data.path=photos", "--config.data.split=images")),
        (np.array(["train"] * 60), ("--config.data.path=photos", "--config.train.total_steps=300")),
    ],
)
def test_too_few_classes_for_others_are_said_with_a_command_that_trains(capsys, splits, fields):
    photos = dataclasses.replace(images(20, 20, 20), splits=splits)
    pca = "model.head_init=pca", "model.weights=none.safetensors"
    assert fitted(photos, *pca, "optim.frozen=encoder").train.total_steps == 1
    said = next(line for line in capsys.readouterr().err.splitlines() if "too few" in line)
    command = shlex.split(said.partition(": python -m hypjax.main ")[2])
    assert command == ["--config=folder:hyp-scratch", *fields]
    config = fitted(
        photos, *pca, *(field.removeprefix("--config.") for field in command[1:]), test=photos
    )
    assert config.train.total_steps > 1


def test_images_per_class_fit_a_batch_that_is_set():
    for sizes, batch, samples in (([20] * 100, 30, 3), ([50] * 7, 64, 16), ([9] * 3, 32, 16)):
        train = fitted(images(*sizes), f"train.batch_size={batch}").train
        assert (train.batch_size, train.samples_per_class) == (batch, samples)
    with pytest.raises(UserError, match="batch_size is 61; .* 2 to 7 classes .* such as 56"):
        fitted(images(*[50] * 7), "train.batch_size=61")


@pytest.mark.slow
def test_a_run_keeps_what_was_chosen_for_it(photos_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(setup, "_SHOWN", 96)
    names = ("train.total_steps", "train.batch_size", "train.samples_per_class")
    unset = [f"{name}=None" for name in (*names, "optim.warmup_steps")]
    config = small_runs.load(photos_folder, *unset)
    results = train.train_and_evaluate(config, tmp_path)
    saved = saved_config(tmp_path)
    assert (saved.train.total_steps, saved.train.batch_size) == (4, 24)
    assert saved.optim.warmup_steps == 0
    scores = results["validation"]
    for state in {"final", "best"} & scores.keys():  # As if training had not helped.
        scores[state]["head"] = scores["untrained"]["head"]
    (tmp_path / "results.json").write_text(json.dumps(results))
    capsys.readouterr()
    assert train.train_and_evaluate(config, tmp_path) == results
    told = capsys.readouterr()
    assert "holds this run's results already" in told.out and "did not help" in told.err
