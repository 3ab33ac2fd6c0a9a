"""Scores against pytorch-metric-learning."""

import pytest

from hypjax.geometry import Sphere
from hypjax.retrieval import mean_average_precision_at_r, r_precision, recall_at_k
from tests.helpers.galleries import labelled

torch = pytest.importorskip("torch", reason="needs the parity extra: torch")
pytest.importorskip("pytorch_metric_learning", reason="needs the parity extra")
pytest.importorskip("faiss", reason="needs the parity extra: faiss-cpu")
from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator  # noqa: E402


def test_scores_are_those_of_pytorch_metric_learning():
    x, labels = labelled(Sphere(), 1500, 60, noise=1.5, dim=128)
    names = ("precision_at_1", "mean_average_precision_at_r", "r_precision")
    calculator = AccuracyCalculator(include=names, device=torch.device("cpu"))
    expected = calculator.get_accuracy(torch.tensor(x), torch.tensor(labels))
    got = (
        recall_at_k(x, labels, ks=(1,), space=Sphere())[1],
        mean_average_precision_at_r(x, labels, space=Sphere()),
        r_precision(x, labels, space=Sphere()),
    )
    assert got == pytest.approx([expected[name] for name in names], abs=1e-6)
