"""The option --dry_run."""

import re

import pytest

from benchmarks.programs import TINY, config_of
from hypjax.errors import UserError
from hypjax.runs.workdir import saved_config
from hypjax.training.dry_run import dry_run
from hypjax.training.gpu_hours import gpu_hours, step_operations
from tests.helpers import small_runs


def test_without_steps_the_evaluation_is_rehearsed(run, photos_folder, capsys):
    weights = f"model.weights={run.with_name('weights.safetensors')}"
    dry_run(small_runs.load(photos_folder, "train.total_steps=0", "optim.warmup_steps=0", weights))
    assert "no steps are trained; embedding every image once takes 0:" in capsys.readouterr().out


@pytest.mark.slow
def test_tells_memory_and_time_and_leaves_nothing(run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    dry_run(saved_config(run))  # Its programs are compiled.
    told = capsys.readouterr().out
    assert re.search(r"0\.0 million parameters and takes 0\.00 billion multiplications", told)
    assert re.search(r"memory of each device: 0\.\d\d GiB for parameters", told)
    seconds = re.search(r"a step takes (\S+) s \(([\d,]+) images per second\)", told)
    assert 0 < float(seconds[1]) < 10
    assert not list(tmp_path.iterdir())


def test_hours_on_gpus_are_estimated_without_data_and_weights(tmp_path, capsys):
    config = config_of(*TINY, "train.batch_size=8", "run.microbatch=2")
    config.run.data_dir = str(tmp_path)
    with pytest.raises(UserError, match="prepare"):
        dry_run(config)
    assert re.search("25000 steps of .* on one T4, .* A100, .* H100", capsys.readouterr().out)
    # Forward and backward, 2 and 4 operations for each token and number of 2 blocks of width 128,
    # without attention's matrices, of which the last block computes the class token alone.
    kernels, tokens = 12 * 128**2, 17 * 8
    assert 6 * kernels * tokens < step_operations(config) < 2 * 6 * kernels * 2 * tokens


def test_hours_are_those_of_the_measured_step():
    hours = gpu_hours(23.6e12, 3600)  # Of ViT-S/16 with 900 images; 1,000 times its seconds.
    assert 0.0616 < hours["H100"] < 0.125 and 0.126 < hours["A100"] < 0.25
    assert 4.2 < hours["T4"] < 8.4  # Each above its roofline time, by less than twice.
