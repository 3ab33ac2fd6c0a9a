"""The option --dry_run."""

import re

import pytest

from hypjax.runs.workdir import saved_config
from hypjax.training.dry_run import dry_run
from tests.helpers import small_runs


def test_without_steps_the_evaluation_is_rehearsed(run, photos_folder, capsys):
    weights = f"model.weights={run.with_name('weights.safetensors')}"
    dry_run(small_runs.load(photos_folder, "train.total_steps=0", "optim.warmup_steps=0", weights))
    assert "no steps are trained; embedding every image once takes 0:" in capsys.readouterr().out


@pytest.mark.slow
def test_prints_memory_and_time_and_leaves_nothing(run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    dry_run(saved_config(run))  # Its programs are compiled.
    printed = capsys.readouterr().out
    assert re.search(r"0\.0 million parameters and takes 0\.00 billion multiplications", printed)
    assert re.search(r"memory of each device: 0\.\d\d GiB for parameters", printed)
    seconds = re.search(r"a step takes (\S+) s \(([\d,]+) images per second\)", printed)
    assert 0 < float(seconds[1]) < 10
    assert not list(tmp_path.iterdir())
