"""The benchmark command, compared with other libraries."""

import functools
import json

import jax
import numpy as np
import pytest

from benchmarks import loss, measure, retrieval
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


@pytest.fixture
def quick_programs():
    """Programs compile faster without most optimisations, as elsewhere in the tests."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def test_all_suites_compare_with_other_libraries(tmp_path, monkeypatch, capsys, quick_programs):
    for peer in ("faiss", "torchvision"):
        pytest.importorskip(peer, reason=f"needs the parity extra: {peer}")
    torch = pytest.importorskip("torch", reason="needs the parity extra: torch")
    # PyTorch traces its programs, but does not spend a minute in a C++ compiler.
    traced = functools.partial(torch.compile, backend="eager")
    monkeypatch.setattr(torch, "compile", traced)
    # Each worker of its loaders imports all of this.
    monkeypatch.setattr("benchmarks.input.usable_cores", lambda: 1)
    monkeypatch.setattr("benchmarks.input._BATCH", 4)
    monkeypatch.setattr(measure, "_MIN_SECONDS", 1e-9)  # What is measured need not be exact.
    monkeypatch.setattr(retrieval, "_QUICK_SIZES", (1100, 220, 1000))
    written, shown = run(tmp_path / "all.json", "all"), capsys.readouterr().out
    assert written["machine"]["versions"]["jax"]
    for suite in ("loss", "retrieval", "input", "train"):
        assert written[suite] and all(task["ratio"] for task in written[suite])
        assert all(task["name"] in shown for task in written[suite])


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
