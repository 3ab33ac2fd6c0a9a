"""The benchmark without other libraries and without the packages for runs and datasets."""

import json
import os
import subprocess
import sys

import pytest

ABSENT = ("orbax", "grain", "tensorflow_datasets", "faiss", "usearch")
ABSENT += ("torch", "torchvision", "timm")
PROGRAM = """
import sys
class Absent:
    names = sys.argv.pop().split(",")
    def find_spec(self, name, path=None, target=None):
        if name in self.names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
from hypjax import benchmark, command
command.run(benchmark.main, benchmark.FLAGS, benchmark.EXAMPLE, benchmark.CHOICES)
"""


def run(tmp_path, repository, *arguments):
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments, ",".join(ABSENT)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(repository)},
        capture_output=True,
        text=True,
        timeout=600,
    )


@pytest.mark.slow
def test_missing_packages_are_named_and_everything_else_is_measured(tmp_path, repository):
    done = run(tmp_path, repository, "all", "--quick")
    assert done.returncode == 0, done.stderr
    assert "warning: skipped: input requires grain (pip install grain)" in done.stderr
    assert "torch (pip install torch)" in done.stdout
    written = json.loads((tmp_path / "benchmark.json").read_text())
    assert {"loss", "retrieval", "train"} < written.keys() and "input" not in written
    for task in written["train"]:
        assert task["peer"] == [] and task["items"] > 0 and task["moving"] > 0


def test_a_suite_without_its_package_says_what_to_install(tmp_path, repository):
    done = run(tmp_path, repository, "input", "--quick")
    assert done.returncode == 1
    assert done.stderr == "error: input requires grain (pip install grain)\n"
