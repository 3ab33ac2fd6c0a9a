"""The option --dry_run."""

import re

import pytest

from hypjax.training.dry_run import _embedded, dry_run
from hypjax.training.setup import build
from tests.helpers import small_runs


def test_tells_memory_and_time_and_leaves_nothing(photos_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    dry_run(small_runs.load(photos_folder))
    told = capsys.readouterr()
    assert re.search(r"memory of each device: 0\.\d\d GiB for parameters", told.out)
    seconds = re.search(r"a step takes (\S+) s \(([\d,]+) images per second\)", told.out)
    assert 0 < float(seconds[1]) < 10
    assert "so 12 steps take about" in told.out
    assert re.search(r"embedding images for evaluations takes about 0:00:\d\d\n", told.out)
    assert "compiling the training step" in told.err
    assert not list(tmp_path.iterdir())


def test_counts_the_images_that_evaluations_embed(photos_folder):
    """There are 18 test images, and as many of validation."""
    evaluations = dict(untrained=2, validation_at_4_8_and_12=3, final=1, best=2)
    config = small_runs.load(photos_folder)
    assert _embedded(build(config)) == 18 * sum(evaluations.values())
    config = small_runs.load(photos_folder, "optim.frozen=encoder", "run.report=True")
    assert _embedded(build(config)) == 36


@pytest.mark.slow
def test_runs_what_the_run_would(photos_folder, capsys):
    fields = ("run.cache=device", "objective.name=contrastive", "objective.memory=0.5")
    dry_run(small_runs.load(photos_folder, *fields))
    assert "a step takes" in capsys.readouterr().out
