"""Runs whose training images are in the device cache."""

import numpy as np
import pytest

from hypjax import train
from tests.helpers import small_runs

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
