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


def test_peers_of_the_other_losses_compute_the_same(torch_peers):
    features = np.random.default_rng(0).normal(size=(12, 16)).astype(np.float32)
    labels = np.repeat(np.arange(6), 2)
    for name, compared in torch_peers.metric_losses(16).items():
        ours, _ = loss.sphere_gradient(compared.ours, features, labels, *compared.proxies)
        (value, slopes), (theirs, their_slopes) = ours(), compared.gradient(features, labels)()
        if name == "contrastive":  # Its peer divides by another number.
            continue
        np.testing.assert_allclose(theirs, value, rtol=1e-5, err_msg=name)
        for own, other in zip(slopes, their_slopes, strict=True):
            largest = np.abs(other).max()
            np.testing.assert_allclose(own, other, atol=1e-5 * largest, err_msg=name)
