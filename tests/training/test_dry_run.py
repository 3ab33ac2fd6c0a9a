"""The option --dry_run."""

import re

import pytest

from hypjax.errors import UserError
from hypjax.training.dry_run import dry_run
from tests.helpers import small_runs


def test_tells_memory_and_time_and_leaves_nothing(photos_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    dry_run(small_runs.load(photos_folder))
    told = capsys.readouterr()
    assert re.search(r"memory of each device: 0\.\d\d GiB for parameters", told.out)
    seconds = re.search(r"a step takes (\S+) s \(([\d,]+) images per second\)", told.out)
    assert 0 < float(seconds[1]) < 10
    assert "so 12 steps take about" in told.out
    assert re.search(r"embedding every image once 0:00:\d\d\n", told.out)
    assert "compiling the training step" in told.err
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["none", "device"])
def test_runs_what_the_run_would(photos_folder, cache, capsys):
    fields = (f"run.cache={cache}", "objective.name=contrastive", "objective.memory=0.5")
    dry_run(small_runs.load(photos_folder, *fields))
    assert "a step takes" in capsys.readouterr().out


def test_finds_the_mistakes_of_a_run(photos_folder):
    config = small_runs.load(photos_folder, "model.weights=none.safetensors")
    with pytest.raises(UserError, match="weights none.safetensors: there is no such file"):
        dry_run(config)
