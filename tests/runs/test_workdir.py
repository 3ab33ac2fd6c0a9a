"""A run's folder: its lock, its identity, damaged files and provenance."""

import contextlib
import json
import os
import sys

import pytest

from hypjax.config import flatten
from hypjax.errors import UserError
from hypjax.runs.workdir import Workdir, saved_config
from tests.helpers import small_runs


def test_a_folder_in_use_is_refused(tmp_path):
    with Workdir(tmp_path, flatten(small_runs.load("photos"))).locked({}):
        with pytest.raises(UserError, match=f"is in use by process {os.getpid()} on "):
            with Workdir(tmp_path, flatten(small_runs.load("photos"))).locked({}):
                pass


def test_another_precision_is_refused(tmp_path):
    workdir = Workdir(tmp_path, flatten(small_runs.load("photos")))
    with workdir.locked({"images": "a", "precision": "float32"}):
        pass
    with pytest.raises(UserError, match="uses float32, but this device bfloat16"):
        with workdir.locked({"images": "a", "precision": "bfloat16"}):
            pass


def test_damaged_files_beside_the_checkpoints_do_not_stop_a_run(tmp_path, capsys):
    config = small_runs.load("photos")
    for name in (None, "run.json", "config.json"):
        if name:
            (tmp_path / name).write_text('{"all": {"se')
        with pytest.raises(UserError, match=r"seed: 0 -> 1") if name else contextlib.nullcontext():
            Workdir(tmp_path, flatten(small_runs.load("photos", f"seed={int(bool(name))}")))
        with Workdir(tmp_path, flatten(config)).locked({}):
            pass
        assert saved_config(tmp_path) == config
        said = capsys.readouterr().err
        assert (f"{name} is damaged" in said) == (name is not None)
    assert json.loads((tmp_path / "run.json").read_text())["seed"] == 0
    (tmp_path / "results.json").write_text("{")
    with pytest.raises(UserError, match="remove it: the same command evaluates"):
        Workdir(tmp_path, flatten(config)).results  # noqa: B018


def test_a_run_may_have_been_saved_before_a_field_was_added(tmp_path):
    with Workdir(tmp_path, flatten(small_runs.load("photos"))).locked({}):
        pass
    saved = json.loads((tmp_path / "config.json").read_text())
    del saved["all"]["train.patience"]
    (tmp_path / "config.json").write_text(json.dumps(saved))
    Workdir(tmp_path, flatten(small_runs.load("photos")))
    with pytest.raises(UserError, match="train.patience: 0 -> 2"):
        Workdir(tmp_path, flatten(small_runs.load("photos", "train.patience=2")))


def test_a_run_records_its_environment(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "hypjax.main", "--workdir=a b"])
    for _ in range(2):
        with Workdir(tmp_path, flatten(small_runs.load("photos", "seed=7"))).locked({}):
            pass
    saved = json.loads((tmp_path / "run.json").read_text())
    assert saved["seed"] == 7 and saved["device"] == "cpu"
    assert saved["command"] == "python -m hypjax.main '--workdir=a b'"
    assert "jax" in saved["versions"]
    (earlier,) = saved["earlier_starts"]
    assert earlier["versions"] == saved["versions"] and "earlier_starts" not in earlier


def test_a_folder_of_images_is_no_workdir(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a/1.jpg").touch()
    with pytest.raises(UserError, match="holds images, such as .*1.jpg; name another --workdir"):
        Workdir(tmp_path, flatten(small_runs.load("photos")))
