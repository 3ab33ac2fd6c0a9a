"""Training gives the same results on any number of devices, slices and processes."""

import json
import math
import pathlib
import signal
from types import SimpleNamespace
from unittest import mock

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh

from hypjax import parallel, train
from hypjax.errors import TryAgainError, UserError
from hypjax.parallel import processes
from tests.helpers import small_runs
from tests.helpers.process_pair import ProcessPair, python


def trajectories(path, training, *cases):
    """Returns what `tests.helpers.trajectories` finds in each case."""
    command = ("-m", "tests.helpers.trajectories", path, training, *cases)
    python(*command, devices=8).check_returncode()
    actual = np.load(path)
    values = [{n: v for n, v in actual.items() if n.startswith(f"{case}:")} for case in cases]
    return [{name.rpartition(":")[2]: v for name, v in named.items()} for named in values]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("training", "cases"),
    [
        ("36/2/20", ["8/2/12", "8/8/12/remat"]),
        ("90/9/20", ["8/1/10"]),
        # Padded to 40 images for slices of 5, to 48 for slices on 8 devices.
        ("36/2/10/taught", ["1/1/5", "8/8/12/remat"]),
        ("36/2/10/lora", ["8/2/5/remat"]),
    ],
)
def test_results_do_not_depend_on_devices_and_slices(tmp_path, training, cases):
    """Cases are devices/shards/microbatch; the reference is one device and one slice."""
    expected, *others = trajectories(tmp_path / "found.npz", training, "1/1/0", *cases)
    assert len(others) == len(cases)
    for other in others:
        np.testing.assert_array_equal(other["start"], expected["start"])
        np.testing.assert_allclose(other["losses"], expected["losses"], rtol=1e-5)
        for name in expected.keys() - {"losses"}:
            error = np.linalg.norm(other[name] - expected[name])
            assert error < 1e-5 * np.linalg.norm(expected[name])


@pytest.mark.slow
def test_parameters_in_parts_are_whole_in_one_block_at_a_time_and_gradients_are_scattered():
    """The encoder has 2.4 million parameters, in twelve blocks."""
    done = python("-m", "tests.helpers.parts", devices=8)
    done.check_returncode()
    program, params = json.loads(done.stdout.splitlines()[-1]), 4 * 2.4e6
    assert program["arguments"] < 3 * params / 7
    assert program["temporary"] < 0.5 * params
    sizes = {
        kind: max(math.prod(map(int, filter(None, shape.split(",")))) for shape in shapes)
        for kind, shapes in program.items()
        if isinstance(shapes, list)
    }
    # Kernels of the perceptrons, which copies of the parameters (here one) reduce in parts.
    assert sizes == {"all-gather": 128 * 512, "reduce-scatter": 128 * 64, "all-reduce": 128 * 64}


def test_fsdp_makes_as_many_parts_as_there_are_devices():
    devices = [object() for _ in range(8)]
    for shape, expected in (((-1, 1), (1, 8)), ((2, 1), (2, 4)), ((-1, 2), (4, 2))):
        mesh = parallel.create_mesh(shape, devices, sharding="fsdp")
        assert mesh.devices.shape == expected
    assert parallel.create_mesh((-1, 1), devices).devices.shape == (8, 1)


def test_slices_have_equal_size_and_hold_all_images():
    mesh = SimpleNamespace(size=8)
    for batch, microbatch, count, images in (
        *((900, 0, 1, 113), (882, 0, 1, 111), (900, 300, 3, 38)),
        *((900, 100, 9, 13), (7, 100, 1, 1)),
    ):
        rows = count * images * 8
        assert parallel.slices(batch, mesh, microbatch) == parallel.Slices(count, rows)
        assert batch <= rows < batch + count * 8


@pytest.mark.slow
def test_two_processes_stop_and_resume_together_and_one_device_finishes(photos_folder, tmp_path):
    """Each writes its parts; the last of its checkpoints is damaged once. One gets each signal."""
    together, alone = tmp_path / "together", tmp_path / "alone"
    gentle = ["train.total_steps=90", "run.log_every=1", "eval.every=0", "run.checkpoint_every=90"]
    gentle += ["optim.learning_rate=3e-5", "objective.temperature=1.0", "run.cache=device"]
    gentle += ["train.batch_size=9", "train.samples_per_class=3", "data.stored_side=18"]
    gentle += ["eval.metrics=recall,mrr,map@r", "eval.expansion=2", "run.sharding=fsdp"]
    steps = [0]
    for start in range(3):
        logged = steps[-1]
        if start == 2:
            small_runs.flip_a_bit(together / f"checkpoints/{steps.pop()}")
        pair = ProcessPair(photos_folder, together, *gentle, "run.microbatch=3")
        pair.wait_for_a_step(after=logged)
        pair.processes[start % 2].send_signal(signal.SIGTERM)
        (status, _, errors), (other_status, *_) = pair.wait_for_both()
        assert status == other_status == 75, errors
        assert start == 0 or f"continuing after step {steps[-1]}" in errors
        steps.append(max(int(x.name) for x in (together / "checkpoints").iterdir()))
        assert logged < steps[-1] < 90
        writers = [*(together / f"checkpoints/{steps[-1]}").glob("*/ocdbt.process_*")]
        assert {x.name for x in writers} == {f"ocdbt.process_{i}" for i in range(2)}

    for run in (together, alone):
        train.train_and_evaluate(small_runs.load(photos_folder, *gentle), run)
    assert (together / "results.json").read_text() == (alone / "results.json").read_text()
    values, expected = small_runs.step_metrics(together), small_runs.step_metrics(alone)
    assert values.keys() == expected.keys() == set(range(1, 91))
    for step, (loss, norm) in expected.items():
        assert values[step] == [pytest.approx(loss, rel=1e-5), pytest.approx(norm, rel=1e-4)]


def test_a_mesh_of_more_devices_than_there_are_is_refused():
    with pytest.raises(UserError, match=r"config.run.mesh is \(2, 3\), 6 devices, but there are 1"):
        parallel.create_mesh((2, 3), jax.devices()[:1])


def test_parameters_are_sharded_along_their_longest_axis_that_can_be_shared():
    mesh = AbstractMesh((4, 2), parallel.AXES)
    shapes = {"kernel": (6, 4, 9), "bias": (8,), "odd": (3, 5), "scalar": ()}
    arrays = {name: jax.ShapeDtypeStruct(shape, np.float32) for name, shape in shapes.items()}
    specs = {n: tuple(x.spec) for n, x in parallel.parameter_shardings(mesh, arrays).items()}
    assert specs == {"kernel": ("parts",), "bias": ("parts",), "odd": (), "scalar": ()}
    last = parallel.parameter_shardings(mesh, jax.ShapeDtypeStruct((3, 4), np.float32))
    assert tuple(last.spec) == (None, "parts")
    alone = AbstractMesh((4, 1), parallel.AXES)
    assert not any(x.spec for x in parallel.parameter_shardings(alone, arrays).values())


def test_what_the_first_process_makes_or_raises_reaches_all(monkeypatch):
    """In the first of two processes, whose messages all receive as they are."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(processes.multihost_utils, "broadcast_one_to_all", lambda x, is_source=0: x)
    assert processes.from_first(lambda: ("é" * 5000, 1)) == ["é" * 5000, 1]
    tree = {"x": np.array([-0.0, 1e-45], np.float32), "y": np.arange(6).reshape(2, 3)}
    received = processes.arrays_from_first(lambda: tree, tree)
    for name, array in tree.items():
        assert received[name].tobytes() == array.tobytes() and received[name].shape == array.shape
    assert processes.arrays_from_first(lambda: None, tree) is None
    for error in (UserError, TryAgainError):
        with pytest.raises(UserError, match="it failed") as raised:
            processes.from_first(mock.Mock(side_effect=error("it failed")))
        assert type(raised.value) is error


@pytest.mark.parametrize(("others", "same_folder"), [(1, True), (0, False)])
def test_a_folder_that_another_process_does_not_write_is_no_folder_of_all(
    monkeypatch, tmp_path, others, same_folder
):
    """In the first of two processes; the other one writes into the folder that it sees, if any."""

    def wait(name):
        if others:
            pathlib.Path(name, "1").touch()

    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(processes, "from_first", lambda make: make())
    monkeypatch.setattr(processes.multihost_utils, "sync_global_devices", wait)
    assert processes.all_write(tmp_path) == same_folder
    assert not any(tmp_path.iterdir())
