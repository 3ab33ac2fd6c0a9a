"""Runs whose training images are in the device cache."""

import numpy as np
import pytest

from hypjax import train
from tests.helpers import small_runs
from tests.helpers.process_pair import ProcessPair

SMALL = ["run.log_every=1", "eval.every=0"]
DEVICE = [*SMALL, "run.cache=device", "run.microbatch=3"]


@pytest.mark.slow
def test_a_run_equals_the_hosts_and_resumes(photos_folder, tmp_path):
    train.train_and_evaluate(small_runs.load(photos_folder, *SMALL), tmp_path / "host")
    config = small_runs.load(photos_folder, *DEVICE)
    results = train.train_and_evaluate(config, tmp_path / "device")
    host, device = (small_runs.step_metrics(tmp_path / name) for name in ("host", "device"))
    assert host.keys() == device.keys() == set(range(1, 13))
    np.testing.assert_allclose([*device.values()], [*host.values()], rtol=1e-2)
    with small_runs.interrupted_after(7):
        train.train_and_evaluate(config, tmp_path / "resumed")
    assert train.train_and_evaluate(config, tmp_path / "resumed") == results
    assert small_runs.step_metrics(tmp_path / "resumed") == device


@pytest.mark.slow
def test_two_processes_that_cannot_share_a_batch_evenly_change_nothing(photos_folder, tmp_path):
    alone, together = tmp_path / "alone", tmp_path / "together"
    fields = [*SMALL, "optim.learning_rate=3e-5", "objective.temperature=1.0"]
    fields += ["train.batch_size=9", "train.samples_per_class=3", "eval.metrics=recall,mrr,map@r"]
    fields += ["run.cache=device", "data.stored_side=18", "eval.expansion=2"]
    train.train_and_evaluate(small_runs.load(photos_folder, *fields), alone)
    processes = ProcessPair(photos_folder, together, *fields, "run.microbatch=3")
    assert [status for status, *_ in processes.wait_for_both()] == [0, 0]
    metrics = [[*small_runs.step_metrics(run).values()] for run in (together, alone)]
    np.testing.assert_allclose(*metrics, rtol=1e-4)
    results = (alone / "results.json").read_text()
    assert "map@r" in results and "notes" in results
    assert (together / "results.json").read_text() == results
