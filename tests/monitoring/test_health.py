"""Runs that end without an error and learn nothing."""

import math

import numpy as np
import pytest

from hypjax import train
from hypjax.config import load_config
from hypjax.errors import UserError
from hypjax.monitoring.health import HealthWatch, warn_if_collapsed
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


def test_a_run_that_does_not_help_says_so(photos_folder, tmp_path, capsys):
    still = small_runs.load(photos_folder, "optim.learning_rate=0")
    results = train.train_and_evaluate(still, tmp_path)
    assert results["final"] == results["untrained"]
    assert (
        capsys.readouterr().err.count("warning: training did not help: recall@1 of the head") == 1
    )


@pytest.mark.slow
def test_the_default_letters_run_has_no_warning(repository, tmp_path, capsys):
    config = load_config(str(repository / "configs/glyphs.py"), ["train.total_steps=250"])
    results = train.train_and_evaluate(config, tmp_path)
    assert "warning" not in capsys.readouterr().err
    assert results["final"]["head"]["recall@1"] > 2 * results["untrained"]["head"]["recall@1"]


@pytest.mark.parametrize(("spread", "warned"), [(1e-5, True), (1e-2, False)])
def test_collapsed_embeddings_are_reported(spread, warned, capsys):
    directions = np.random.default_rng(0).normal(size=(50, 8)).astype(np.float32)
    warn_if_collapsed(np.ones(8, np.float32) + spread * directions, "the search means little")
    printed = capsys.readouterr().err
    assert ("so the search means little" in printed) == warned == bool(printed)
