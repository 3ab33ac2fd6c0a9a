"""The benchmark without other libraries."""

import json
import os
import subprocess
import sys

import pytest

ABSENT = ("faiss", "usearch", "torch", "torchvision", "timm")
PROGRAM = f"""
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name in {ABSENT}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
from hypjax import benchmark, command
from hypjax.benchmarks import measure, retrieval
measure.product_rate = lambda *_, **__: 1e11
retrieval._QUICK_SIZES = 1500, 300, 5000
command.run(benchmark.main, benchmark.FLAGS, benchmark.EXAMPLE, benchmark.CHOICES)
"""


@pytest.mark.slow
def test_missing_libraries_are_named_and_everything_else_is_measured(tmp_path, repository):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, "all", "--quick"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(repository)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    for missing in ("torch", "pytorch-metric-learning", "faiss-cpu", "torchvision", "torch timm"):
        assert f"(pip install {missing})" in done.stdout
    written = json.loads((tmp_path / "benchmark.json").read_text())
    assert {"loss", "retrieval", "input", "train"} < written.keys()
    for task in written["train"]:
        assert task["peer"] == [] and task["items"] > 0 and task["moving"] > 0
