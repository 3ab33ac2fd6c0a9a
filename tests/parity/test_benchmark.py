"""The benchmark command, compared with other libraries."""

import json

import numpy as np
import pytest

from benchmarks import loss
from tests.helpers import commands


@pytest.fixture
def torch_peers():
    """The module of PyTorch's side, if it and pytorch-metric-learning are installed."""
    pytest.importorskip("torch", reason="needs the parity extra: torch")
    pytest.importorskip("pytorch_metric_learning", reason="needs the parity extra")
    from benchmarks import torch_peers

    return torch_peers


def run(output, suite):
    commands.call("benchmarks", suite, "--quick", f"--output={output}")
    return json.loads(output.read_text())


def test_searches_are_right_where_points_crowd(tmp_path):
    pytest.importorskip("faiss", reason="needs the parity extra: faiss")
    rows = run(tmp_path / "exactness.json", "exactness")["exactness"]
    for row in rows:
        assert row["right"]["hypjax"] == 1
        assert row["recall@1"]["hypjax"] == row["recall@1"]["true"]
    assert min(row["right"]["faiss"] for row in rows) < 0.5


@pytest.mark.parametrize(("classes", "samples"), [(12, 2), (5, 4)])
def test_peers_of_the_loss_compute_the_same(torch_peers, classes, samples):
    features = np.random.default_rng(0).normal(size=(classes * samples, 16)).astype(np.float32)
    ours, _ = loss.gradient(features, samples)
    found, (slope,) = ours()
    peers = torch_peers.hyperbolic_losses(features, samples)
    for name in ("Möbius sums [n, m, dim]", "our formula"):
        value, (theirs,) = peers[name]()
        np.testing.assert_allclose(value, found, rtol=1e-5)
        np.testing.assert_allclose(theirs, slope, atol=1e-5 * np.abs(slope).max())
