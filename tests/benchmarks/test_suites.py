"""Suites without other libraries: whole runs, parity with a CPU, and the timed ones."""

import json
import signal

import pytest

from benchmarks import job, measure
from hypjax.errors import Interrupted, UserError
from tests.helpers import commands
from tests.helpers.process_pair import python


def test_runs_without_accelerator_are_refused(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    with pytest.raises(UserError, match="try --quick"):
        job.rows(measure.Options())


def test_an_interrupt_keeps_the_rows_before_it():
    tasks = [
        measure.Task("a", lambda: None),
        measure.Task("b", lambda: signal.raise_signal(signal.SIGTERM)),
        measure.Task("c", lambda: None),
    ]
    rows = []
    with pytest.raises(Interrupted) as ended:
        rows.extend(measure.measure(tasks, measure.Options(quick=True)))
    assert [row["name"] for row in rows] == ["a"] and ended.value.status == 75


@pytest.mark.slow
def test_a_second_run_compiles_nothing_and_finds_the_same(tmp_path):
    short = ("--quick", "--cache=none", "--config.train.total_steps=4", "--config.model.depth=1")
    done = python("-m", "benchmarks", "job", *short, cwd=tmp_path, TMPDIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.glob("hypjax-job-*"))
    written = json.loads((tmp_path / "benchmark.json").read_text())["job"]
    cold, warm = ({row["part"]: row[name] for row in written} for name in job.RUNS)
    assert cold["programs compiled"] > 0 == warm["programs compiled"]
    recall = "final recall@1 of the head"
    assert cold[recall] == warm[recall]
    assert f"| {recall} | {cold[recall]:.4g} | {warm[recall]:.4g} |" in done.stdout
    assert all(0 < run["whole process, s"] - run["total, s"] < 60 for run in (cold, warm))


@pytest.mark.slow
def test_a_cpu_agrees_with_itself(tmp_path):
    output = tmp_path / "parity.json"
    commands.call("benchmarks", "parity", "--quick", f"--output={output}")
    rows = json.loads(output.read_text())["parity"]
    assert len(rows) == 6 and all(row["passed"] for row in rows)
    assert [row["error"] for row in rows[-2:]] == [0, 0]  # Of recalls.
    assert all(row["error"] > 1e-6 for row in rows[:2])  # In bfloat16.


ABSENT = ("faiss", "usearch", "torch", "torchvision", "timm")
PROGRAM = f"""
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name in {ABSENT}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
from hypjax import command
from benchmarks import __main__ as main, input, measure, retrieval
measure._MIN_SECONDS = 1e-9  # What is measured need not be exact.
input._BATCH = 4
retrieval._QUICK_SIZES = 1100, 220, 1000
command.run(main.main, main.FLAGS, main.EXAMPLE, main.CHOICES)
"""


@pytest.mark.slow
def test_missing_libraries_are_named_and_everything_else_is_measured(tmp_path):
    done = python("-c", PROGRAM, "all", "--quick", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for missing in ("torch", "pytorch-metric-learning", "faiss-cpu", "torchvision", "torch timm"):
        assert f"pip install {missing}" in done.stdout
    written = json.loads((tmp_path / "benchmark.json").read_text())
    assert {"loss", "retrieval", "input", "train"} < written.keys()
    assert all(task["peer"] == [] and task["rate"] > 0 for task in written["train"])
