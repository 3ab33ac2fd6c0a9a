"""Batches and schedules that fit the user's own images."""

import json

import numpy as np
import pytest

from hypjax import train
from hypjax.config import fitting, load_config, validate
from hypjax.config.fitting import fit_to_images
from hypjax.errors import UserError
from hypjax.runs.workdir import saved_config
from tests.helpers import small_runs
from tests.helpers.pictures import dataset_without_images


def images(*sizes):
    return dataset_without_images(np.repeat(np.arange(len(sizes)), sizes))


def fitted(train, *overrides):
    config = load_config("folder:hyp-scratch", ["data.path=photos", *overrides])
    validate(config)
    config = fit_to_images(config, train.labels, len(train))
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


def test_a_head_of_principal_components_sees_each_image_25_times_in_200_steps_or_more():
    pca = ("model.head_init=pca", "model.weights=none.safetensors")
    assert fitted(images(*[20] * 8), *pca).train.total_steps == 10  # The encoder is trained, too.
    pca += ("optim.frozen=encoder",)
    for classes, steps in ((3, 200), (20, 200), (80, 625)):
        assert fitted(images(*[20] * classes), *pca).train.total_steps == steps


def test_half_a_batch_with_boxes_are_images():
    config = load_config(
        "captions:hycoclip", ["data.path=photos.csv", "model.text.encoder=onnx:none"]
    )
    labels = np.repeat(np.arange(5), 100)  # Of 40 images, and their boxes.
    train = fit_to_images(config, labels, num_images=40).train
    assert (train.batch_size, train.total_steps) == (80, 200)
    train = fit_to_images(config, labels, num_images=4000).train
    assert (train.batch_size, train.total_steps) == (256, 25 * 2 * 4000 // 256 + 1)


def test_images_per_class_fit_a_batch_that_is_set():
    for sizes, batch, samples in (([20] * 100, 30, 3), ([50] * 7, 64, 16), ([9] * 3, 32, 16)):
        train = fitted(images(*sizes), f"train.batch_size={batch}").train
        assert (train.batch_size, train.samples_per_class) == (batch, samples)
    with pytest.raises(UserError, match="batch_size is 61; .* 2 to 7 classes .* such as 56"):
        fitted(images(*[50] * 7), "train.batch_size=61")


@pytest.mark.slow
def test_a_run_keeps_what_was_chosen_for_it(photos_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(fitting, "_SHOWN_IMAGES", 96)
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
    printed = capsys.readouterr()
    assert "holds this run's results already" in printed.out and "did not help" in printed.err
