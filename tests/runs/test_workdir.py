"""A run's folder: its lock, its identity, damaged files and provenance."""

import json
import os
import sys

import pytest

from hypjax.errors import UserError
from hypjax.runs.workdir import Workdir
from tests.helpers import small_runs


def test_a_folder_in_use_is_refused(tmp_path):
    with Workdir(tmp_path, small_runs.load("photos")).locked({}):
        with pytest.raises(UserError, match=f"is in use by process {os.getpid()} on "):
            with Workdir(tmp_path, small_runs.load("photos")).locked({}):
                pass


def test_another_precision_is_refused(tmp_path):
    workdir = Workdir(tmp_path, small_runs.load("photos"))
    with workdir.locked({"images": "a", "precision": "float32"}):
        pass
    with pytest.raises(UserError, match="uses float32, but this device bfloat16"):
        with workdir.locked({"images": "a", "precision": "bfloat16"}):
            pass


def test_a_run_records_its_environment(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "hypjax.main", "--workdir=a b"])
    for _ in range(2):
        with Workdir(tmp_path, small_runs.load("photos", "seed=7")).locked({}):
            pass
    saved = json.loads((tmp_path / "run.json").read_text())
    assert saved["seed"] == 7 and saved["device"] == "cpu"
    assert saved["command"] == "python -m hypjax.main '--workdir=a b'"
    assert "jax" in saved["versions"]
    (earlier,) = saved["earlier_starts"]
    assert earlier["versions"] == saved["versions"] and "earlier_starts" not in earlier
