"""Runs in cloud storage, simulated by an fsspec file system on a local folder."""

import contextlib
import json
import signal
import time

import fsspec
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem

from hypjax import train
from hypjax.data.photos import find_photos
from hypjax.errors import Interrupted, UserError
from hypjax.evaluate import evaluate
from hypjax.inference.embedder import TrainedEmbedder
from hypjax.inference.weights import pretrained_encoder
from hypjax.models import create_embedder
from hypjax.runs import cloud_copy
from hypjax.runs.checkpoints import Checkpoints
from hypjax.runs.cloud_copy import CloudCopy, reading
from hypjax.system.locks import claimed_or_refused
from hypjax.training import loop
from tests.helpers import small_runs

URL = "bucket://runs/a"


class Bucket(DirFileSystem):
    """Object storage in a folder; it logs requests and can fail on demand."""

    protocol = "bucket"
    cachable = False
    root, fails, requests = None, None, []

    def __init__(self, **options):
        super().__init__(str(self.root), LocalFileSystem(auto_mkdir=True), **options)

    def _begin(self, verb, path):
        name = path.removeprefix("runs/a/")
        if self.fails and type(self).fails(verb, name):
            raise OSError("storage unreachable")
        self.requests.append((verb, name))


def logging(method, verb, place=0):
    """Makes a method log its request, whose path is the argument in this place."""

    def call(self, *args, **options):
        self._begin(verb, args[place])
        return getattr(super(Bucket, self), method)(*args, **options)

    setattr(Bucket, method, call)


for method, verb in {"find": "find", "cat_file": "cat", "get_file": "get", "rm_file": "rm"}.items():
    logging(method, verb)
logging("pipe_file", "put")
logging("put_file", "put", place=1)


@pytest.fixture
def bucket(tmp_path, monkeypatch):
    fsspec.register_implementation("bucket", Bucket, clobber=True)
    for name, value in {"root": tmp_path / "bucket", "fails": None, "requests": []}.items():
        monkeypatch.setattr(Bucket, name, value)
    return Bucket


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Returns a function that simulates another machine by its own cache folder."""

    def move(name):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / name))

    move("one")
    return move


def always(verb, name):
    return True


class KilledError(Exception):
    """Ends a run like `kill -9`: nothing more is uploaded."""


@contextlib.contextmanager
def killed(bucket):
    """Expects the body to be killed before it could upload everything."""
    with pytest.raises(KilledError):
        yield
    bucket.fails = None


def kill(bucket):
    bucket.fails = always
    raise KilledError


def begin(url=URL):
    """Returns a run that has started."""
    run = CloudCopy(url)
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
    return sorted(int(path.name) for path in (folder / "checkpoints").glob("*"))


def in_cloud(bucket):
    folder = bucket.root / "runs/a"
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def wait_until(condition):
    """Waits until a thread has made a condition true."""
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.fixture
def quick(monkeypatch):
    """Makes the thread check and upload often."""
    monkeypatch.setattr(cloud_copy, "_POLL_SECONDS", 0.005)
    monkeypatch.setattr(cloud_copy, "_UPLOAD_SECONDS", 0.02)


@pytest.mark.slow
def test_a_run_continues_on_another_machine(photos_folder, bucket, machine, monkeypatch, capfd):
    few = ["train.total_steps=6", "run.checkpoint_every=2", "data.validation_classes=0"]
    few += ["eval.pca.head=3"]
    config, save = small_runs.load(photos_folder, *few), loop.save

    def interrupted_save(*args):
        monkeypatch.setattr(loop, "save", save)
        save(*args)
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(loop, "save", interrupted_save)
    with pytest.raises(Interrupted, match="step 3 is saved"):
        train.train_and_evaluate(config, URL)
    machine("two")
    results = train.train_and_evaluate(config, URL)
    printed = capfd.readouterr()
    assert "continuing after step 3" in printed.err
    assert f"results.json, metrics.jsonl and the models are in {URL}" in printed.out
    assert bucket.requests[-1] == ("put", "results.json")
    cloud = bucket.root / "runs/a"
    assert json.loads((cloud / "results.json").read_text()) == results
    measured = [json.loads(line)["step"] for line in (cloud / "metrics.jsonl").open()]
    assert measured == [0, 2, 3, 4, 6, 6]
    kept = {name.split("/")[1] for name in in_cloud(bucket) if name.startswith("checkpoints/")}
    assert kept == {"4", "6"}

    machine("three")
    bucket.requests.clear()
    trained = TrainedEmbedder(URL)
    assert not any("training" in name for _, name in bucket.requests)
    assert trained.embed(find_photos(str(photos_folder / "class1"))).vectors.shape == (6, 3)
    with reading(URL, training=True) as folder:
        assert (folder / "checkpoints/6/training").is_dir()
    other = small_runs.load(photos_folder, f"model.weights={URL}")
    kernels = pretrained_encoder(other, create_embedder(other).encoder)
    jax.tree.map(np.testing.assert_array_equal, kernels, trained.params["encoder"])
    assert train.train_and_evaluate(config, URL) == results
    assert f"{URL} holds this run's results already" in capfd.readouterr().out


def test_what_a_killed_run_did_not_upload_is_kept_on_its_machine(bucket, machine):
    with killed(bucket), begin() as run:
        save(run, 1)
        kill(bucket)
    assert "checkpoints/1/record" not in in_cloud(bucket)
    assert steps(CloudCopy(URL).folder) == [1]
    assert "checkpoints/1/record" in in_cloud(bucket)
    machine("two")
    assert steps(CloudCopy(URL).folder) == [1]


def test_if_another_machine_continued_the_run_the_cloud_copy_counts(bucket, machine, capfd):
    with begin() as run:
        save(run, 1)
    with killed(bucket), CloudCopy(URL) as run:
        save(run, 2, "late")
        kill(bucket)
    machine("two")
    with CloudCopy(URL) as other:
        assert steps(other.folder) == [1]
        save(other, 2)
    machine("one")
    run = CloudCopy(URL)
    assert (run.folder / "checkpoints/2/model/data").read_text() == "weights 2"
    (aside,) = run.folder.parent.glob("*-unsent-1")
    assert (aside / "checkpoints/2/model/data").read_text() == "late 2"
    assert f"what was never uploaded from here is kept in {aside}" in capfd.readouterr().err


def test_new_checkpoints_precede_removals_and_results_come_last(bucket, machine):
    with begin() as run:
        save(run, 1)
    (bucket.root / "runs/a/notes.txt").write_text("Not the run's.")
    bucket.requests.clear()
    with CloudCopy(URL) as run:
        save(run, 2)
        (run.folder / "checkpoints/1/record").unlink()
        (run.folder / "checkpoints/1/model/data").unlink()
        (run.folder / "metrics.jsonl").write_text("1")
        (run.folder / "results.json").write_text("{}")
    changes = [(verb, name) for verb, name in bucket.requests if verb in ("put", "rm")]
    two = [("put", "checkpoints/2/model/data"), ("put", "checkpoints/2/record")]
    one = {("rm", "checkpoints/1/model/data"), ("rm", "checkpoints/1/record")}
    assert changes[:4] == [("put", "writer.json"), ("put", "metrics.jsonl"), *two]
    assert set(changes[4:6]) == one and changes[6:] == [("put", "results.json")]
    assert "notes.txt" in in_cloud(bucket)


@pytest.mark.parametrize("last", ["model/_METADATA", "training/manifest.ocdbt"])
def test_a_partly_uploaded_checkpoint_is_skipped(bucket, machine, capfd, last):
    """The parameter is the last file that was uploaded."""
    like = {"kernel": jnp.arange(1000.0)}

    def checkpoint(run, step):
        with contextlib.closing(Checkpoints(run.folder / "checkpoints")) as checkpoints:
            checkpoints.save(step, record={}, model=like, training=like)

    with begin() as run:
        checkpoint(run, 1)

    def cut(verb, name):
        return f"checkpoints/2/{last}" in in_cloud(bucket)

    with pytest.raises(UserError, match="storage unreachable"), CloudCopy(URL) as run:
        checkpoint(run, 2)
        bucket.fails = cut
    bucket.fails = None
    machine("two")
    run = CloudCopy(URL)
    assert steps(run.folder) == [1, 2]
    with contextlib.closing(Checkpoints(run.folder / "checkpoints")) as checkpoints:
        assert checkpoints.restore_latest(model=like, training=like).step == 1
    assert "checkpoint of step 2 in" in capfd.readouterr().err


def test_unreachable_storage_is_reported_once_and_retried(bucket, machine, quick, capfd):
    with begin() as run:
        bucket.fails = always
        for step in (1, 2, 3):
            save(run, step)
            time.sleep(0.05)
        bucket.fails = None
        wait_until(lambda: "checkpoints/3/record" in in_cloud(bucket))
    printed = capfd.readouterr().err
    assert printed.count("warning") == 1 and printed.count("is up to date again") == 1
    assert f"warning: cannot write to {URL} (storage unreachable); the run continues in" in printed


def test_results_that_were_not_uploaded_are_uploaded_by_the_same_command(bucket, machine):
    run = begin()
    message = f"cannot write to {URL} .storage unreachable.; the whole run is in {run.folder}, and"
    with pytest.raises(UserError, match=message), run:
        save(run, 1)
        (run.folder / "results.json").write_text("{}")
        bucket.fails = always
    with pytest.raises(UserError, match="cannot read bucket://runs/a .storage unreachable"):
        CloudCopy(URL)
    bucket.fails = None
    CloudCopy(URL)
    assert {"results.json", "checkpoints/1/record"} <= in_cloud(bucket)


def test_a_checkpoint_that_is_replaced_during_its_upload_arrives_complete(bucket, machine, quick):
    """Otherwise a slow upload might never finish any checkpoint."""

    def replacing(verb, name):
        if (verb, name) == ("put", "checkpoints/1/model/data"):
            for path in (run.folder / "checkpoints/1/record", run.folder / name):
                path.unlink(missing_ok=True)
        return False

    bucket.fails = replacing
    with begin() as run:
        save(run, 1)
        wait_until(lambda: ("put", "checkpoints/1/record") in bucket.requests)
    assert (run.folder / "checkpoints/1").exists()
    wait_until(lambda: "checkpoints/1/record" not in in_cloud(bucket))


def test_a_run_is_locked_on_its_machine(bucket, machine):
    with begin() as run, claimed_or_refused(run.folder):
        with pytest.raises(UserError, match="is in use by process"):
            CloudCopy(URL)


def test_a_run_stops_uploading_once_another_machine_took_over(bucket, machine):
    with pytest.raises(UserError, match="taken over by process .* whose results are in"):
        with begin() as run:
            machine("two")
            with begin():
                pass
            save(run, 1)
    assert "checkpoints/1/record" not in in_cloud(bucket)


def test_a_run_that_was_removed_from_the_cloud_starts_over(bucket, machine):
    with begin() as run:
        save(run, 1)
        (run.folder / "results.json").write_text("{}")
    bucket.requests.clear()
    for name in in_cloud(bucket):
        (bucket.root / "runs/a" / name).unlink()
    assert not steps(CloudCopy(URL).folder)
    assert not (run.folder / "config.json").exists()


@pytest.mark.parametrize("loss", ["emptied", "truncated"])
def test_a_damaged_local_folder_does_not_harm_the_cloud_copy(bucket, machine, loss):
    with begin() as run:
        save(run, 1)
    if loss == "emptied":
        (run.folder / "checkpoints").rename(run.folder.parent / "elsewhere")
    else:
        (run.folder / "checkpoints/1/record").write_text("")
    assert (CloudCopy(URL).folder / "checkpoints/1/record").read_text() == "record 1"
    assert (bucket.root / "runs/a/checkpoints/1/record").read_text() == "record 1"


def test_other_files_in_the_cloud_are_not_downloaded(bucket, machine):
    (bucket.root / "runs/a").mkdir(parents=True)
    (bucket.root / "runs/a/archive.zip").write_text("large")
    assert not (CloudCopy(URL).folder / "archive.zip").exists()
    with pytest.raises(UserError, match=f"{URL} holds no run; name the folder of one"):
        evaluate(small_runs.load("photos"), URL)


def test_reading_downloads_only_new_files(bucket, machine):
    def read():
        with reading(f"{URL}/") as folder:
            bucket_has = {path.name for path in (folder / "checkpoints").iterdir()}
            got = {name for verb, name in bucket.requests if verb == "get"}
        bucket.requests.clear()
        return bucket_has, got

    with begin() as run:
        save(run, 1)
    files = {"config.json", "checkpoints/1/record", "checkpoints/1/model/data"}
    assert read() == ({"1"}, files) and read() == ({"1"}, set())
    with CloudCopy(URL) as run:
        save(run, 2)
        for name in ("record", "model/data"):
            (run.folder / "checkpoints/1" / name).unlink()
    assert read() == ({"2"}, {"checkpoints/2/record", "checkpoints/2/model/data"})


def test_a_checkpoint_that_is_removed_during_the_download_is_skipped(bucket, machine):
    with begin() as run:
        save(run, 1)
        save(run, 2)

    def removing(verb, name):
        if (verb, name) == ("get", "checkpoints/1/record"):
            (bucket.root / "runs/a" / name).unlink(missing_ok=True)
            (bucket.root / "runs/a/checkpoints/1/model/data").unlink(missing_ok=True)
        return False

    bucket.fails = removing
    with reading(URL) as folder:
        assert steps(folder) == [2]


def test_folders_are_created_if_the_storage_has_any(tmp_path, machine):
    url = f"file://{tmp_path}/far/away"
    with begin(url) as run:
        save(run, 1)
    assert (tmp_path / "far/away/checkpoints/1/model/data").read_text() == "weights 1"
    with pytest.raises(UserError, match="cannot write to file:///nowhere/a .*No such file"):
        begin("file:///nowhere/a").__enter__()
    with pytest.raises(UserError, match="cannot read nothing://a .*nothing"):
        CloudCopy("nothing://a")
