"""Runs that end without an error and learn nothing."""

import math

import pytest

from hypjax import train
from hypjax.errors import UserError
from hypjax.monitoring.health import HealthWatch
from tests.helpers import small_runs

HEALTHY = {"logit_min": -20.0, "logit_max": -0.5, "batch_recall@1": 0.6, "clipped_share": 1.0}
COLLAPSED = HEALTHY | {"logit_min": -0.9, "batch_recall@1": 0.0}
AT_CHANCE = HEALTHY | {"batch_recall@1": 0.05}


def watch(stop=False):
    """Batches of 16 classes with 4 images: recall at chance is 3/63."""
    return HealthWatch(settled=50, batch_size=64, samples_per_class=4, stop=stop)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (COLLAPSED, "the embeddings have collapsed by step 60: the logits of a batch span 0.4"),
        (AT_CHANCE, "nothing is being learned by step 60: recall@1 within a batch is 0.050, and"),
    ],
)
def test_a_fault_is_reported_once_after_the_warm_up_or_ends_the_run(values, message, capsys):
    health = watch()
    health.check(50, values)
    assert capsys.readouterr().err == ""
    for step in (60, 70):
        health.check(step, values)
    printed = capsys.readouterr().err
    assert printed.startswith(f"warning: {message}") and len(printed.splitlines()) == 1
    with pytest.raises(UserError, match="train.on_collapse=stop"):
        watch(stop=True).check(60, values)


@pytest.mark.parametrize(
    "values", [HEALTHY, {"loss": 1.0}, HEALTHY | {"logit_min": -0.51 - math.log(30)}]
)
def test_a_healthy_step_is_not_reported(values, capsys):
    watch(stop=True).check(60, values)
    assert capsys.readouterr().err == ""


def test_a_collapsed_run_says_so_or_stops(photos_folder, tmp_path, capsys):
    flat = "objective.temperature=1000"  # Logits of a batch span less than 0.1.
    config = small_runs.load(photos_folder, flat)
    train.train_and_evaluate(config, tmp_path / "warned")
    assert capsys.readouterr().err.count("warning: the embeddings have collapsed") == 1
    config = small_runs.load(photos_folder, flat, "train.on_collapse=stop")
    with pytest.raises(UserError, match="the embeddings have collapsed by step 3: .* span 0.0"):
        train.train_and_evaluate(config, tmp_path / "stopped")
