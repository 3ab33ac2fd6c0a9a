"""Checkpoints: which are kept, damaged ones, and saves that fail."""

import contextlib
import shutil
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hypjax.errors import UserError
from hypjax.runs.checkpoints import Checkpoints, checksum
from hypjax.training import train
from tests.helpers import small_runs
from tests.helpers.system_limits import small_disk


def state(value, size=1000):
    rng = np.random.default_rng(value)
    return {"kernel": jnp.asarray(rng.normal(size=size), jnp.float32), "step": jnp.int32(value)}


def save(checkpoints, step, score=None, size=1000):
    checkpoints.save(step, record={"at": step}, score=score, model=state(step, size))


def on_disk(path):
    return sorted(int(folder.name) for folder in path.iterdir() if folder.name.isdigit())


def test_the_latest_two_and_the_best_are_kept(tmp_path):
    scores = {1: 0.3, 2: None, 3: 0.7, 4: 0.7, 5: None, 6: 0.1, 7: None}
    for step, score in scores.items():  # As if each were saved by another process.
        with contextlib.closing(Checkpoints(tmp_path)) as checkpoints:
            save(checkpoints, step, score)
    assert on_disk(tmp_path) == [3, 6, 7]
    with contextlib.closing(Checkpoints(tmp_path)) as checkpoints:
        assert checkpoints.best == (3, 0.7)
        save(checkpoints, 8, 0.9)
        save(checkpoints, 9)
        save(checkpoints, 10)
    assert on_disk(tmp_path) == [8, 9, 10]


def test_a_restored_state_equals_the_saved_one(tmp_path):
    with contextlib.closing(Checkpoints(tmp_path)) as checkpoints:
        save(checkpoints, 5, 0.25)
    read = Checkpoints(tmp_path, read_only=True).restore_latest(model=state(0))
    assert read.step == 5 and read.record == {"at": 5}
    for ours, saved in zip(jax.tree.leaves(read.trees[0]), jax.tree.leaves(state(5)), strict=True):
        np.testing.assert_array_equal(ours, saved)
    empty_folder = Checkpoints(tmp_path / "none")
    assert empty_folder.restore_latest(model=state(0)) is None and empty_folder.best == (None, None)


def largest_file(folder):
    return max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


def truncate(folder):
    file = largest_file(folder)
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def flip_a_bit(folder):
    file = largest_file(folder)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 16
    file.write_bytes(bytes(content))


def empty(folder):
    shutil.rmtree(folder)
    folder.mkdir()


@pytest.mark.parametrize(
    "damage", [truncate, flip_a_bit, empty, lambda folder: shutil.rmtree(folder / "record")]
)
def test_a_damaged_checkpoint_is_moved_aside_and_the_previous_one_is_used(tmp_path, capfd, damage):
    path = tmp_path / "checkpoints"
    with contextlib.closing(Checkpoints(path)) as checkpoints:
        save(checkpoints, 1)
        save(checkpoints, 2)
    damage(path / "2")
    reading = Checkpoints(path, read_only=True)
    assert reading.restore_latest(model=state(0)).step == 1
    assert on_disk(path) == [1, 2]
    with contextlib.closing(Checkpoints(path)) as checkpoints:
        read = checkpoints.restore_latest(model=state(0))
        assert read.step == 1 and checkpoints.steps == [1]
        np.testing.assert_array_equal(read.trees[0]["kernel"], state(1)["kernel"])
        assert len(capfd.readouterr().err.splitlines()) == 2  # One from each of the two readers.
        assert (tmp_path / "damaged-step-2").exists()
        save(checkpoints, 2)
    assert on_disk(path) == [1, 2]


def test_a_damaged_best_checkpoint_is_moved_aside_and_the_next_is_used(tmp_path, capfd):
    path = tmp_path / "checkpoints"
    with contextlib.closing(Checkpoints(path)) as checkpoints:
        for step, score in ((1, 0.9), (2, 0.5), (3, 0.4)):
            save(checkpoints, step, score)
    flip_a_bit(path / "1")
    with contextlib.closing(Checkpoints(path)) as checkpoints:
        checkpoints.restore_latest(model=state(0))
        assert checkpoints.restore_best(model=state(0)).step == checkpoints.best[0] == 2
        save(checkpoints, 4)
    assert on_disk(path) == [2, 3, 4] and (tmp_path / "damaged-step-1").exists()
    assert "the checkpoint of step 1 in" in capfd.readouterr().err


def test_if_all_checkpoints_are_damaged_nothing_is_changed(tmp_path):
    path = tmp_path / "checkpoints"
    with contextlib.closing(Checkpoints(path)) as checkpoints:
        save(checkpoints, 1)
        save(checkpoints, 2)
    for step in ("1", "2"):
        truncate(path / step)
    before = sorted(tmp_path.rglob("*"))
    with contextlib.closing(Checkpoints(path)) as checkpoints:
        with pytest.raises(UserError, match=r"every checkpoint in .* is damaged \(steps 2, 1: "):
            checkpoints.restore_latest(model=state(0))
    assert sorted(tmp_path.rglob("*")) == before


def test_the_checksum_depends_on_every_bit_and_position():
    tree = {"a": jnp.arange(6, dtype=jnp.float32), "b": jnp.array([True, False]), "c": jnp.int8(3)}
    changed = [
        {"a": tree["a"][jnp.array([1, 0, 2, 3, 4, 5])]},
        {"a": -tree["a"]},
        {"b": ~tree["b"]},
        {"c": jnp.int8(4)},
    ]
    for bit in range(32):
        bits = np.arange(6, dtype=np.float32).view(np.uint32)
        bits[bit % 6] ^= np.uint32(1 << bit)
        changed.append({"a": jnp.asarray(bits.view(np.float32))})
    for change in changed:
        assert checksum(tree | change) != checksum(tree), change


def remount(option, disk):
    subprocess.run(["mount", "-o", f"remount,{option}", str(disk)], check=True)


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [("size=300k", "size=1m", "No space left on device"), ("ro", "rw", "Read-only file system")],
)
def test_a_failed_save_is_reported_and_the_next_one_succeeds(
    tmp_path, capfd, before, after, reason
):
    with small_disk(tmp_path / "disk", "1m") as disk:
        with contextlib.closing(Checkpoints(disk / "checkpoints")) as checkpoints:
            save(checkpoints, 1, size=50_000)
            checkpoints.wait()
            remount(before, disk)
            save(checkpoints, 2, size=50_000)
            checkpoints.wait()
            printed = capfd.readouterr().err
            assert "warning: the state after step 2 could not be saved" in printed
            assert reason in printed and "Traceback" not in printed
            assert checkpoints.steps == [1]
            remount(after, disk)
            save(checkpoints, 3, size=50_000)
        assert on_disk(disk / "checkpoints") == [1, 3]
        assert not list((disk / "checkpoints").glob("*tmp*"))


@pytest.mark.hygiene
def test_a_run_fails_on_a_full_disk_only_at_its_end(photos_folder, tmp_path, capsys):
    with small_disk(tmp_path / "disk", "64k") as disk:
        with pytest.raises(UserError, match="the last state of this run could not be saved"):
            train.train_and_evaluate(small_runs.load(photos_folder), disk / "run")
        printed = capsys.readouterr()
        assert printed.err.count("warning: the state after step") >= 4
        assert "final      head" in printed.out
        assert not (disk / "run/results.json").exists()
        remount("size=4m", disk)
        results = train.train_and_evaluate(small_runs.load(photos_folder), disk / "run")
    assert results.keys() == {"untrained", "final", "best", "best_step", "validation"}
