"""Benchmarks beside other libraries, and losses beside pytorch-metric-learning."""

import functools
import json

import numpy as np
import pytest

from benchmarks import loss
from hypjax import objectives
from tests.helpers import commands


@pytest.fixture
def torch_peers():
    """The module of PyTorch's side, if it and pytorch-metric-learning are installed."""
    pytest.importorskip("torch", reason="needs the parity extra: torch")
    pytest.importorskip("pytorch_metric_learning", reason="needs the parity extra")
    from benchmarks import torch_peers

    return torch_peers


def test_searches_are_right_where_points_crowd(tmp_path):
    pytest.importorskip("faiss", reason="needs the parity extra: faiss")
    output = tmp_path / "exactness.json"
    commands.call("benchmarks", "exactness", "--quick", f"--output={output}")
    rows = json.loads(output.read_text())["exactness"]
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


def test_losses_are_those_of_pytorch_metric_learning(torch_peers):
    """Value and gradients, with the defaults of both, of images and of proxies of 98 classes."""
    from pytorch_metric_learning.losses import CircleLoss, SubCenterArcFaceLoss

    proxies = SubCenterArcFaceLoss(num_classes=98, embedding_size=7, sub_centers=4)
    arcface = functools.partial(objectives.arcface, margin=np.radians(28.6))
    peers = torch_peers.metric_losses(7)
    peers |= {"arcface": torch_peers.Compared(arcface, proxies)}
    peers |= {"circle": torch_peers.Compared(objectives.circle, CircleLoss())}
    features = np.random.default_rng(0).normal(size=(24, 7)).astype(np.float32) + 0.5
    labels = np.random.default_rng(1).permutation(np.repeat(np.arange(8), 3))
    del peers["contrastive"]  # It is divided by the numbers of pairs with a loss.
    for name, compared in peers.items():
        ours, _ = loss.sphere_gradient(compared.ours, features, labels, *compared.proxies)
        value, slopes = compared.gradient(features, labels)()
        found, actual = ours()
        np.testing.assert_allclose(found, float(value), rtol=1e-4, err_msg=name)
        for slope, expected in zip(actual, slopes, strict=True):
            expected = expected.detach().cpu().numpy()
            tolerance = 1e-4 * np.abs(expected).max()
            np.testing.assert_allclose(slope, expected, atol=tolerance, err_msg=name)
