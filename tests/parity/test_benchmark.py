"""The benchmark as a user types it."""

import json
import os
import pathlib
import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("suite", "peer", "works"), [("retrieval", "faiss", 9), ("input", "torchvision", 6)]
)
def test_a_suite_beside_its_peer(tmp_path, suite, peer, works):
    pytest.importorskip(peer, reason=f"needs the parity extra: {peer}")
    done = subprocess.run(
        [sys.executable, "-m", "hypjax.benchmark", suite, "--quick"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(pathlib.Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    written = json.loads((tmp_path / "benchmark.json").read_text())
    assert written["machine"]["versions"]["jax"]
    assert len(written[suite]) == works
    for work in written[suite]:
        assert work["ratio"] > 0 and (work["limit"] or work["items"]) > 0
        assert work["name"] in done.stdout


def test_mistakes_are_answered_in_one_sentence(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "hypjax.benchmark", "retrival"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(pathlib.Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (
        done.returncode == 1
        and done.stderr == "error: 'retrival' is not one of retrieval, input, memory, job\n"
    )
