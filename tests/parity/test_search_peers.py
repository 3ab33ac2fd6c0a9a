"""Scores beside those of pytorch-metric-learning, and neighbours beside those of faiss."""

import numpy as np
import pytest

from hypjax.engines.faiss_files import export_flat
from hypjax.geometry import PoincareBall, Sphere
from hypjax.retrieval import (
    mean_average_precision_at_r,
    nearest_neighbors,
    r_precision,
    recall_at_k,
)
from tests.helpers.galleries import embeddings, labelled
from tests.helpers.small_runs import REPOSITORY


@pytest.mark.parametrize("dim", [8, 128])
def test_scores_are_those_of_pytorch_metric_learning(dim):
    pytest.importorskip("pytorch_metric_learning", reason="needs the parity extra")
    pytest.importorskip("faiss", reason="needs the parity extra: faiss-cpu")
    import torch
    from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator

    x, labels = labelled(Sphere(), 1500, 60, noise=1.5, dim=dim)
    names = ("precision_at_1", "mean_average_precision_at_r", "r_precision")
    calculator = AccuracyCalculator(include=names, device=torch.device("cpu"))
    expected = calculator.get_accuracy(torch.tensor(x), torch.tensor(labels))
    got = (
        recall_at_k(x, labels, ks=(1,), space=Sphere())[1],
        mean_average_precision_at_r(x, labels, space=Sphere()),
        r_precision(x, labels, space=Sphere()),
    )
    assert got == pytest.approx([expected[name] for name in names], abs=1e-6)


@pytest.mark.parametrize("space", [Sphere(), PoincareBall(0.1, 2.3)], ids=str)
def test_the_documented_index_finds_the_same_neighbours(space, tmp_path, monkeypatch):
    pytest.importorskip("faiss", reason="needs the parity extra: faiss-cpu")
    x, _ = labelled(space, 1500, 60, noise=1.5, dim=24)
    gallery = embeddings(x, space)
    gallery.save(tmp_path / "gallery.npz")
    export_flat(gallery, tmp_path / "gallery.faiss")
    page = (REPOSITORY / "docs/engines.md").read_text()
    examples = [part for part in page.split("```") if "faiss.read_index" in part]
    (example,) = [part for part in examples if "euclidean" not in part]
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(example.removeprefix("python"), names)
    _, found = nearest_neighbors(x, x, k=10, space=space)
    np.testing.assert_array_equal(names["found"], found)
