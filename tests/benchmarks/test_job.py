"""The benchmark of whole runs, and all benchmarks without other libraries."""

import json

import pytest

from benchmarks import job
from benchmarks.measure import Options
from hypjax.errors import UserError
from hypjax.monitoring import stopwatch
from tests.helpers.process_pair import python


def run(recall, **more):
    seconds = dict.fromkeys((*stopwatch.PARTS, "total"), 1.5)
    programs = {"compiled": 3, "cached": 4}
    final = {"head": {"recall@1": recall}}
    return {"seconds": seconds, "programs": programs, "process_seconds": 2, "final": final, **more}


def test_the_table_compares_the_runs(capsys):
    lines = job.table(
        {"cold": run(0.5, host_memory_peak=2e9), "warm": run(0.501, device_memory_peak=3e9)}
    ).splitlines()
    assert lines[0] == "| part | cold | warm |"
    assert "| compile, s | 1.50 | 1.50 |" in lines
    assert "| host memory, peak | 2.00 GB | unknown |" in lines
    assert lines[-1] == "| final recall@1 of the head | 0.5000 | 0.5010 |"
    assert capsys.readouterr().err == ""
    job.table({"cold": run(0.5), "warm": run(0.6)})
    assert "warning: the final recalls of the runs differ" in capsys.readouterr().err


def test_runs_without_accelerator_are_refused(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    with pytest.raises(UserError, match="no accelerator, .* hours; try --quick"):
        job.rows(Options(quick=False))


@pytest.mark.slow
def test_a_second_run_compiles_nothing_and_finds_the_same(tmp_path):
    short = ("--quick", "--cache=none", "--config.train.total_steps=4", "--config.model.depth=1")
    done = python("-m", "benchmarks", "job", *short, cwd=tmp_path, TMPDIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.glob("hypjax-job-*"))
    written = json.loads((tmp_path / "benchmark.json").read_text())
    cold, warm = (written["job"][name] for name in job.RUNS)
    assert cold["steps"] == warm["steps"] == 4 and cold["final"] == warm["final"]
    assert cold["programs"]["compiled"] > 0 == warm["programs"]["compiled"]
    for run in (cold, warm):
        assert 0 < run["process_seconds"] - run["seconds"]["total"] < 60
    assert f"| {warm['seconds']['compile']:.2f} |" in done.stdout


ABSENT = ("faiss", "usearch", "torch", "torchvision", "timm")
PROGRAM = f"""
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name in {ABSENT}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
from hypjax import command
from benchmarks import __main__ as main, input, measure, retrieval, train
# What is measured need not be exact.
measure.product_rate = lambda *_, **__: 1e11
measure._MIN_SECONDS = 1e-9
train.copy_rate = lambda size: 1e10
input._BATCH = 4
retrieval._QUICK_SIZES = 1100, 220, 1000
command.run(main.main, main.FLAGS, main.EXAMPLE, main.CHOICES)
"""


@pytest.mark.slow
def test_missing_libraries_are_named_and_everything_else_is_measured(tmp_path):
    done = python("-c", PROGRAM, "all", "--quick", "--repeats=1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for missing in ("torch", "pytorch-metric-learning", "faiss-cpu", "torchvision", "torch timm"):
        assert f"(pip install {missing})" in done.stdout
    written = json.loads((tmp_path / "benchmark.json").read_text())
    assert {"loss", "retrieval", "input", "train"} < written.keys()
    for task in written["train"]:
        assert task["peer"] == [] and task["items"] > 0 and task["moving"] > 0
