"""Runs in cloud storage, simulated by an fsspec file system on a local folder."""

import json
import pathlib
import shutil
import signal

import fsspec
import jax
import numpy as np
import pytest
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem

from hypjax import train
from hypjax.assemble import assemble_method
from hypjax.errors import Interrupted, UserError
from hypjax.evaluate import evaluate
from hypjax.inference.model import load
from hypjax.inference.pretrained import pretrained_encoder
from hypjax.runs import cloud_copy
from hypjax.runs.cloud_copy import CloudCopy
from hypjax.training.loop import Loop
from tests.helpers import small_runs

URL = "bucket://runs/a"


class Bucket(DirFileSystem):
    """Object storage in a folder; it logs requests and can fail on demand."""

    protocol = "bucket"
    cachable = False
    root, fails, requests = None, False, []

    def __init__(self, **options):
        super().__init__(str(self.root), LocalFileSystem(auto_mkdir=True), **options)

    def _log(self, verb, paths):
        for path in paths:
            name = path.removeprefix("runs/a/")
            if self.fails:
                raise OSError("storage unreachable")
            self.requests.append((verb, name))

    def get(self, paths, *args, **options):
        self._log("get", paths)
        return super().get(paths, *args, **options)

    def put(self, local, paths, **options):
        for source, path in zip(local, paths, strict=True):
            self._log("put", [path])
            super().put_file(source, path)

    def rm_file(self, path):
        self._log("rm", [path])
        return super().rm_file(path)


@pytest.fixture
def bucket(tmp_path, monkeypatch):
    fsspec.register_implementation("bucket", Bucket, clobber=True)
    for name, value in {"root": tmp_path / "bucket", "fails": False, "requests": []}.items():
        monkeypatch.setattr(Bucket, name, value)
    monkeypatch.setattr(cloud_copy, "_INTERVAL", 0.02)
    return Bucket


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Returns a function that simulates another machine by its own cache folder."""

    def move(name):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / name))

    move("one")
    return move


def begin():
    """Returns a run that has started."""
    run = CloudCopy(URL)
    (run.folder / "config.json").write_text("{}")
    return run


def save(run, step, content="weights"):
    """Writes a checkpoint of two files atomically."""
    unfinished = run.folder / f"checkpoints/{step}.orbax-checkpoint-tmp"
    (unfinished / "model").mkdir(parents=True)
    (unfinished / "model/data").write_text(f"{content} {step}")
    (unfinished / "record").write_text(f"record {step}")
    unfinished.rename(run.folder / f"checkpoints/{step}")


def steps(folder):
    return {int(path.parent.name) for path in (folder / "checkpoints").glob("*/record")}


@pytest.mark.slow
def test_a_run_continues_on_another_machine(photos_folder, bucket, machine, monkeypatch, capfd):
    few = ["train.total_steps=6", "run.checkpoint_every=2", "data.validation_classes=0"]
    few += ["eval.pca.head=3"]
    config, save = small_runs.load(photos_folder, *few), Loop.save

    def interrupted_save(*args, **options):
        monkeypatch.setattr(Loop, "save", save)
        save(*args, **options)
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(Loop, "save", interrupted_save)
    with pytest.raises(Interrupted, match="step 3 is saved"):
        train.train_and_evaluate(config, URL)
    machine("two")
    results = train.train_and_evaluate(config, URL)
    assert "continuing after step 3" in capfd.readouterr().err
    cloud = bucket.root / "runs/a"
    assert json.loads((cloud / "results.json").read_text()) == results
    saved = filter(pathlib.Path.is_file, cloud.glob("checkpoints/**/*"))
    assert {path.relative_to(cloud).parts[1] for path in saved} == {"4", "6"}

    machine("three")
    bucket.requests.clear()
    trained = load(URL)
    assert not any("training" in name for verb, name in bucket.requests if verb == "get")
    assert trained.embed(photos_folder / "class1").shape == (6, 3)
    other = small_runs.load(photos_folder, f"model.weights={URL}")
    kernels = pretrained_encoder(assemble_method(other))
    jax.tree.map(np.testing.assert_array_equal, kernels, trained.params["encoder"])
    assert evaluate(config, URL)["final"] == results["final"]
    assert train.train_and_evaluate(config, URL) == results


def test_if_another_machine_continued_the_run_the_cloud_copy_counts(bucket, machine):
    with begin() as run:
        save(run, 1)
    with pytest.raises(UserError, match="storage unreachable"), CloudCopy(URL) as run:
        bucket.fails = True
        save(run, 2, "late")
    bucket.fails = False
    machine("two")
    with CloudCopy(URL) as other:
        assert steps(other.folder) == {1}
        save(other, 2)
    machine("one")
    run = CloudCopy(URL)
    assert (run.folder / "checkpoints/2/model/data").read_text() == "weights 2"


def test_new_checkpoints_precede_removals_and_results_come_last(bucket, machine, monkeypatch):
    monkeypatch.setattr(cloud_copy, "_INTERVAL", 60)
    with begin() as run:
        save(run, 1)
    (bucket.root / "runs/a/notes.txt").write_text("Not the run's.")
    with CloudCopy(URL) as run:
        bucket.requests.clear()
        save(run, 2)
        shutil.rmtree(run.folder / "checkpoints/1")
        (run.folder / "metrics.jsonl").write_text("1")
        (run.folder / "results.json").write_text("{}")
    changes = [f"{verb} {name.partition('/')[0]}" for verb, name in bucket.requests]
    kinds = list(dict.fromkeys(change for change in changes if "config" not in change))
    assert kinds == ["put metrics.jsonl", "put checkpoints", "rm checkpoints", "put results.json"]
    cloud = bucket.root / "runs/a"
    assert (cloud / "notes.txt").exists() and steps(cloud) == {2}


def test_a_run_stops_uploading_once_another_machine_took_over(bucket, machine):
    with pytest.raises(UserError, match="taken over"), begin() as run:
        machine("two")
        with begin():
            pass
        save(run, 1)
    assert not steps(bucket.root / "runs/a")
