"""Checkpoints: which are kept, and damaged ones."""

import contextlib
import math
import shutil
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hypjax.errors import UserError
from hypjax.runs.checkpoints import Checkpoints, checksum, parts_checksum
from tests.helpers.small_runs import flip_a_bit


def state(value):
    rng = np.random.default_rng(value)
    return {"kernel": jnp.asarray(rng.normal(size=1000), jnp.float32), "step": jnp.int32(value)}


def save(checkpoints, step, score=None):
    checkpoints.save(step, record={"at": step}, score=score, model=state(step))


def save_all(path, scores):
    """Saves checkpoints with these scores by step."""
    path = path / "checkpoints"
    with contextlib.closing(Checkpoints(path)) as checkpoints:
        for step, score in scores.items():
            save(checkpoints, step, score)
    return path


def on_disk(path):
    return sorted(int(folder.name) for folder in path.iterdir() if folder.name.isdigit())


def test_the_latest_two_and_the_best_are_kept(tmp_path):
    scores = {1: 0.3, 2: None, 3: 0.7, 4: 0.7, 5: None, 6: 0.1, 7: None}
    for step, score in scores.items():  # As if each were saved by another process.
        path = save_all(tmp_path, {step: score})
    assert on_disk(path) == [4, 6, 7]
    reading = Checkpoints(path, read_only=True)
    assert reading.best == (4, 0.7)
    read = reading.restore_latest(model=state(0))
    assert read.step == 7 and read.record == {"at": 7}
    jax.tree.map(np.testing.assert_array_equal, read.trees[0], state(7))
    save_all(tmp_path, {8: 0.9, 9: None, 10: None})
    assert on_disk(path) == [8, 9, 10]
    empty_folder = Checkpoints(tmp_path / "none")
    assert empty_folder.restore_latest(model=state(0)) is None and empty_folder.best == (None, None)


@pytest.mark.parametrize("scores", [(0.9, 0.5, math.nan), (math.nan, 0.9, 0.5)])
def test_a_score_that_is_no_number_is_never_the_best(scores, tmp_path):
    steps = dict(enumerate([*scores, None, None], 1))
    path = save_all(tmp_path, steps)
    best = scores.index(0.9) + 1
    assert on_disk(path) == [best, 4, 5]
    assert Checkpoints(path, read_only=True).best == (best, 0.9)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "uint8", "bool"])
def test_a_checksum_of_parts_notices_each_bit_and_places(dtype):
    rng = np.random.default_rng(0)
    tree = {x: rng.integers(0, 2, (3, 5, 2)).astype(dtype) for x in "ab"} | {"c": np.float32(1)}
    expected = parts_checksum(tree)
    assert parts_checksum(jax.tree.map(jnp.asarray, tree)) == expected
    assert parts_checksum(tree | {"a": tree["b"], "b": tree["a"]}) != expected
    assert parts_checksum(tree | {"a": tree["a"][::-1]}) != expected
    for place in range(30):
        for bit in range(8 * tree["a"].itemsize if dtype != "bool" else 1):
            content = bytearray(tree["a"].tobytes())
            content[place * tree["a"].itemsize + bit // 8] ^= 1 << bit % 8
            flipped = np.frombuffer(bytes(content), tree["a"].dtype).reshape(3, 5, 2)
            assert parts_checksum(tree | {"a": flipped}) != expected


@pytest.mark.parametrize("cut", ["", '{"item_handlers": {"mo', "\x00" * 20])
def test_orbax_logs_nothing_about_truncated_metadata(tmp_path, capfd, cut):
    path = save_all(tmp_path, {1: None, 2: None})
    (path / "2/_CHECKPOINT_METADATA").write_text(cut)
    with contextlib.closing(Checkpoints(path)) as checkpoints:
        assert checkpoints.restore_latest(model=state(0)).step in (1, 2)
    lines = capfd.readouterr().err.splitlines()
    assert all(line.startswith("warning: the checkpoint of step 2 in") for line in lines), lines


@pytest.mark.parametrize("damage", [flip_a_bit, lambda folder: shutil.rmtree(folder / "record")])
def test_a_damaged_checkpoint_is_moved_aside_and_the_previous_one_is_used(tmp_path, damage):
    path = save_all(tmp_path, {1: None, 2: None})
    damage(path / "2")
    reading = Checkpoints(path, read_only=True)
    assert reading.restore_latest(model=state(0)).step == 1
    assert on_disk(path) == [1, 2]
    with contextlib.closing(Checkpoints(path)) as checkpoints:
        read = checkpoints.restore_latest(model=state(0))
        assert read.step == 1 and checkpoints.steps == [1]
        np.testing.assert_array_equal(read.trees[0]["kernel"], state(1)["kernel"])
        assert (tmp_path / "damaged-step-2").exists()
        save(checkpoints, 2)
    assert on_disk(path) == [1, 2]


def changed_record(old, new):
    """Damages the record of a checkpoint by replacing a text in it."""

    def damage(folder):
        text = (folder / "record/metadata").read_text()
        assert old in text
        (folder / "record/metadata").write_text(text.replace(old, new) if old else "")

    return damage


RECORDS = [("", ""), ('"score": 0.9', '"score": 0.1'), ('"at": 1', '"at": 3'), ("[1000]", "[1001]")]
RECORDS += [('"checksum":', '"no checksum":')]


@pytest.mark.parametrize(
    "damage",
    [flip_a_bit, *(changed_record(*texts) for texts in RECORDS)],
    ids=["array", "empty", "score", "step", "shape", "checksum"],
)
def test_a_damaged_best_checkpoint_is_moved_aside_and_the_next_is_used(tmp_path, capfd, damage):
    path = save_all(tmp_path, {1: 0.9, 2: 0.5, 3: 0.4})
    damage(path / "1")
    for reading in (True, False):
        with contextlib.closing(Checkpoints(path, read_only=reading)) as checkpoints:
            checkpoints.restore_latest(model=state(0))
            assert checkpoints.restore_best(1, model=state(0)).step == checkpoints.best[0] == 2
            if not reading:
                save(checkpoints, 4)
        damaged, best, *more = capfd.readouterr().err.splitlines()
        assert "the checkpoint of step 1 in" in damaged and "that of step 2 is used" in damaged
        assert "of step 1, cannot be read; that of step 2 is taken as the best" in best and not more
    assert on_disk(path) == [2, 3, 4] and (tmp_path / "damaged-step-1").exists()


def test_damaged_arrays_are_named_in_short_and_without_tracebacks(tmp_path, capfd, monkeypatch):
    path = save_all(tmp_path, {1: None})
    (path / "1/model/manifest.ocdbt").write_bytes(b"")
    monkeypatch.setattr(sys, "unraisablehook", sys.__unraisablehook__)
    with pytest.raises(UserError, match=r"\(steps 1: Error decoding manifest: [^{]{0,99}\);"):
        Checkpoints(path, read_only=True).restore_latest(model=state(0))
    sys.unraisablehook(SimpleNamespace(exc_value=RuntimeError("Event loop is closed")))
    assert not capfd.readouterr().err


def test_if_all_checkpoints_are_damaged_nothing_is_changed(tmp_path):
    path = save_all(tmp_path, {1: None, 2: None})
    for step in ("1", "2"):
        flip_a_bit(path / step)
    before = sorted(tmp_path.rglob("*"))
    with contextlib.closing(Checkpoints(path)) as checkpoints:
        with pytest.raises(UserError, match=r"every checkpoint in .* is damaged \(steps 2, 1: "):
            checkpoints.restore_latest(model=state(0))
    assert sorted(tmp_path.rglob("*")) == before


def test_the_checksum_depends_on_values_and_their_order():
    tree = {"a": jnp.arange(6, dtype=jnp.float32), "b": jnp.array([True, False]), "c": jnp.int8(3)}
    changes = {"a": tree["a"].at[:2].set([1, 0])}, {"a": -tree["a"]}, {"b": ~tree["b"]}
    changed = [tree | change for change in ({}, *changes, {"c": jnp.int8(4)})]
    assert len({checksum(x) for x in changed}) == 5
