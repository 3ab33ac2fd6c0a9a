"""The option --dry_run."""

import re

import pytest

from benchmarks.programs import TINY, config_of
from hypjax.dry_run import dry_run, step_operations
from hypjax.errors import UserError
from hypjax.runs.workdir import saved_config
from tests.helpers import small_runs


def test_without_steps_the_evaluation_is_rehearsed(run, photos_folder, capsys):
    weights = f"model.weights={run.with_name('weights.safetensors')}"
    for split in ("classes", "none"):
        fields = "train.total_steps=0", "optim.warmup_steps=0", f"data.split={split}", weights
        dry_run(small_runs.load(photos_folder, *fields))
        printed = capsys.readouterr().out
        assert "no steps are trained; embedding every image once takes 0:" in printed


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


@pytest.mark.parametrize(
    ("fields", "target", "sentence"),
    [
        (("train.batch_size=8",), "h200", "h200, which must be one of t4, .*TPUs such as v5e:2x4"),
        (("train.batch_size=8",), "h100:0", "h100:0, which must be one of"),
    ],
)
def test_unknown_targets_are_one_sentence(fields, target, sentence):
    with pytest.raises(UserError, match=sentence):
        dry_run(config_of(*TINY, *fields), target)


def test_hours_on_gpus_are_estimated_without_data_and_weights(tmp_path, capsys):
    config = config_of(*TINY, "train.batch_size=8", "run.microbatch=2")
    config.run.data_dir = str(tmp_path)
    with pytest.raises(UserError, match="prepare"):
        dry_run(config)
    size = r"the encoder has \d\.\d million parameters and takes \d\.\d+ billion multiplications"
    hours = "25000 steps of .* on one T4, .* A100, .* H100"
    assert re.match(f"{size}.*\n{hours}", capsys.readouterr().out)
    config.train.total_steps = config.optim.warmup_steps = 0  # Such as `irt-o`.
    with pytest.raises(UserError):
        dry_run(config)
    assert re.match(f"{size}.*\n$", capsys.readouterr().out)
    # Forward and backward, 2 and 4 operations for each token and number of 2 blocks of width 128,
    # without attention's matrices, of which the last block computes the class token alone.
    kernels, tokens = 12 * 128**2, 17 * 8
    assert 6 * kernels * tokens < step_operations(config) < 2 * 6 * kernels * 2 * tokens
