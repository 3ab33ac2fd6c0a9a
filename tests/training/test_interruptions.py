"""Runs that are killed or interrupted, then resumed."""

import os
import pathlib
import signal
import time

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from hypjax import train
from tests.helpers import small_runs

RIEMANNIAN = [
    *("objective.name=hier+proxy_anchor", "objective.hier_optimizer=riemannian"),
    *("objective.hier_neighbors=4", "objective.hier_proxies=8"),
]
STEADY = ["train.total_steps=12", "run.checkpoint_every=1", "optim.learning_rate=1e-3"]


def saved_arrays(run: pathlib.Path) -> dict:
    """Returns all arrays of a run's last checkpoint by path."""
    last = max((run / "checkpoints").iterdir(), key=lambda folder: int(folder.name))
    with ocp.StandardCheckpointer() as reader:
        trees = {item: reader.restore(last / item) for item in ("model", "training")}
    return {jax.tree_util.keystr(k): v for k, v in jax.tree_util.tree_leaves_with_path(trees)}


def assert_same_run(run: pathlib.Path, other: pathlib.Path, least: int = 50) -> None:
    assert (run / "results.json").read_bytes() == (other / "results.json").read_bytes()
    arrays, others = saved_arrays(run), saved_arrays(other)
    assert arrays.keys() == others.keys() and len(arrays) > least
    for name, array in arrays.items():
        np.testing.assert_array_equal(array, others[name], err_msg=name)


@pytest.mark.slow
def test_a_run_killed_while_saving_ends_like_an_undisturbed_one(photos_folder, tmp_path):
    runs, killed = [tmp_path / name for name in ("whole", "killed")], 0
    for saves in (1, 3, 2):
        process, seen = small_runs.start(photos_folder, runs[1], *STEADY), set()
        while process.poll() is None and len(seen) < saves:
            seen |= {path.name for path in runs[1].glob("checkpoints/*tmp*")}
            time.sleep(0.001)
        process.kill()
        process.communicate()
        killed += process.returncode == -signal.SIGKILL
    assert killed
    for run in runs:
        train.train_and_evaluate(small_runs.load(photos_folder, *STEADY), run)
    assert_same_run(*runs)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test_a_signal_ends_a_run_which_saves_first(photos_folder, tmp_path, number, status):
    """A terminal sends an interrupt to all processes of a command: workers must ignore it."""
    long = ["optim.schedule=constant", "eval.every=0", "train.total_steps=30000", "run.workers=1"]
    long.append("run.checkpoint_every=30000")
    process = small_runs.start(photos_folder, tmp_path, *long, start_new_session=True)
    metrics = tmp_path / "metrics.jsonl"
    while process.poll() is None and not (metrics.exists() and "loss" in metrics.read_text()):
        time.sleep(0.01)
    os.killpg(process.pid, number)
    _, printed = process.communicate(timeout=60)
    assert process.returncode == status
    saved = max(int(path.name) for path in (tmp_path / "checkpoints").iterdir())
    assert 0 < saved < 30000
    last = f"interrupted; step {saved} is saved, and the same command resumes from there"
    assert printed.splitlines()[-1] == last
    assert "Traceback" not in printed and "leaked" not in printed


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [
        ["optim.name=muon", "train.head_warmup_steps=1"],
        ["objective.learn_c=True", "objective.c_rate=50", "train.ema_decay=0.9", *RIEMANNIAN]
        + ["objective.space=lorentz", "objective.max_distance=9.56", "objective.hier_decay=0.1"],
        ["run.cache=device", "run.microbatch=3"],
        ["train.cached_features=True", "optim.frozen=encoder", *RIEMANNIAN],
        ["objective.name=contrastive", "objective.memory=20", "objective.memory_decay=0.9"]
        + ["model.drop_path=0.5", "model.depth=2", "train.lora_rank=2", "train.ema_decay=0.9"]
        + ["train.head_warmup_steps=5", "optim.layer_decay=0.5"],  # Interrupted before they end.
    ],
    ids=["muon", "learned_curvature", "device_cache", "cached_features", "memory"],
)
def test_other_runs_resume_to_the_same_result(photos_folder, tmp_path, fields):
    fields = [*fields, "train.total_steps=6", "run.checkpoint_every=1"]
    config = small_runs.load(photos_folder, *fields)
    train.train_and_evaluate(config, tmp_path / "whole")
    with small_runs.interrupted_after(4):
        train.train_and_evaluate(config, tmp_path / "resumed")
    train.train_and_evaluate(config, tmp_path / "resumed")
    assert_same_run(tmp_path / "resumed", tmp_path / "whole", least=20)
    metrics = [small_runs.step_metrics(tmp_path / name) for name in ("resumed", "whole")]
    assert metrics[0] == metrics[1]
