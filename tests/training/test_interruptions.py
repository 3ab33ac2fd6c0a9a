"""Runs that are killed or interrupted, then resumed."""

import os
import pathlib
import random
import re
import signal
import time

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from hypjax.training import train
from tests.helpers import small_runs
from tests.helpers.system_limits import lossy_disk

KILLS = int(os.environ.get("HYPJAX_TEST_KILLS", "4"))
# With a constant schedule, runs of all lengths share one compiled step.
FLAT = ["optim.schedule=constant", "eval.every=0"]
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


def kill_while_saving(process, run: pathlib.Path, saves: int) -> None:
    """Kills a process after seeing the given number of saves in progress."""
    seen = set()
    while process.poll() is None and len(seen) < saves:
        seen |= {path.name for path in run.glob("checkpoints/*tmp*")}
        time.sleep(0.001)
    process.kill()


@pytest.fixture(scope="module")
def whole(photos_folder, tmp_path_factory) -> pathlib.Path:
    """A run that nothing disturbs."""
    workdir = tmp_path_factory.mktemp("undisturbed") / "run"
    train.train_and_evaluate(small_runs.load(photos_folder, *STEADY), workdir)
    return workdir


@pytest.mark.slow
def test_a_run_killed_repeatedly_ends_like_an_undisturbed_one(whole, photos_folder, tmp_path):
    """Every second kill comes during a save."""
    rng = random.Random(0)
    runs, kills = [tmp_path / "run0"], 0
    while kills < KILLS:
        process = small_runs.start(photos_folder, runs[-1], *STEADY)
        if kills % 2:
            kill_while_saving(process, runs[-1], rng.randint(1, 4))
        else:
            time.sleep(rng.uniform(0, 6))
            process.kill()
        process.communicate()
        kills += process.returncode == -signal.SIGKILL
        if (runs[-1] / "results.json").exists():
            runs.append(tmp_path / f"run{len(runs)}")
        assert len(runs) <= KILLS
    for run in runs:
        train.train_and_evaluate(small_runs.load(photos_folder, *STEADY), run)
        assert_same_run(run, whole)


def wait_for_steps(process, run):
    metrics = run / "metrics.jsonl"
    while process.poll() is None and not (metrics.exists() and "loss" in metrics.read_text()):
        time.sleep(0.01)


def ends(group: int) -> bool:
    """Whether all processes of a group end within ten seconds."""
    for _ in range(100):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test_a_signal_ends_a_run_which_saves_first(photos_folder, tmp_path, number, status):
    """A terminal sends an interrupt to all processes of a command: workers must ignore it."""
    long = [*FLAT, "train.total_steps=30000", "run.checkpoint_every=30000", "run.workers=1"]
    process = small_runs.start(photos_folder, tmp_path, *long, start_new_session=True)
    wait_for_steps(process, tmp_path)
    os.killpg(process.pid, number)
    _, printed = process.communicate(timeout=60)
    assert process.returncode == status
    saved = max(int(path.name) for path in (tmp_path / "checkpoints").iterdir())
    assert 0 < saved < 30000
    assert "interrupted: finishing this step and saving" in printed
    last = f"interrupted; step {saved} is saved, and the same command resumes from there"
    assert printed.splitlines()[-1] == last
    assert "Traceback" not in printed and "leaked" not in printed
    assert ends(process.pid), "a process survived"


@pytest.mark.hygiene
def test_a_stopped_run_survives_a_power_failure(whole, photos_folder, tmp_path, capsys):
    """The state that it reports, and later its results and measurements, are on the disk."""
    with lossy_disk(tmp_path) as disk:
        run = disk.path / "run"
        process = small_runs.start(photos_folder, run, *STEADY)
        wait_for_steps(process, run)
        process.send_signal(signal.SIGTERM)
        printed = process.communicate(timeout=100)[1]
        disk.cut_power()
        step = re.search(r"step (\d+) is saved", printed)[1]
        train.train_and_evaluate(small_runs.load(photos_folder, *STEADY), run)
        disk.cut_power()
        assert f"continuing after step {step}\n" in capsys.readouterr().err
        assert_same_run(run, whole)
        assert small_runs.step_metrics(run) == small_runs.step_metrics(whole)


@pytest.mark.parametrize("name", [pytest.param("sgd", marks=pytest.mark.slow), "muon"])
def test_a_run_of_another_optimiser_resumes_to_the_same_result(photos_folder, tmp_path, name):
    fields = [f"optim.name={name}", "train.total_steps=4", "train.probe_steps=1"]
    config = small_runs.load(photos_folder, *fields, "run.checkpoint_every=1")
    train.train_and_evaluate(config, tmp_path / "whole")
    with small_runs.interrupted_after(2):
        train.train_and_evaluate(config, tmp_path / "resumed")
    train.train_and_evaluate(config, tmp_path / "resumed")
    assert_same_run(tmp_path / "resumed", tmp_path / "whole", least=20)
