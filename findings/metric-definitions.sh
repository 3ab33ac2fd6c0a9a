#!/usr/bin/env bash
# Libraries of metrics define MAP@10 in two ways, and take a query without positives in four.
#
# Versions: pytorch-metric-learning 2.9.0, torchmetrics 1.9.0, open-metric-learning 4.0.0,
# torch 2.13.0.
#
# Source: average precision at K sums the precisions at the hits among the first K and divides, in
# different books, by the number of relevant items, by the smaller of it and K, or by the number of
# hits found (Musgrave et al., ECCV 2020, Section 3.2, discuss the first two).
#
# Input: one query with 100 relevant items among 1,000. The first ten found are all relevant; or the
# first only; or the first and the tenth. Then a query of a class that no item has.
#
# Expected: values that grow with hits. A query without positives is refused, left out or counted,
# but in one way by all metrics of a library.
#
# Seen: MAP@10 is 0.1, 0.01 and 0.012 by pytorch-metric-learning, which divides by 100; it is 1, 1
# and 0.6 by torchmetrics and by open-metric-learning, which divide by the number of hits, so that a
# second hit lowers it. The query without positives is left out by pytorch-metric-learning (NaN if
# there is no other), 0 by torchmetrics, and by open-metric-learning NaN in the precision, which
# makes the mean of all queries NaN, but 0 in CMC and MAP.
#
# Why it matters: one table's MAP@10 is another's times ten. hypjax has MAP@R and MAP over all
# items, which divide by the number of relevant ones, and leaves out queries without positives, with
# a warning.
#
# The script exits with 0 while this is so, and with 1 once it has changed.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
# open-metric-learning asks for NumPy 1 and for packages of pictures that its metrics do not use.
"$work/venv/bin/pip" install --quiet pytorch-metric-learning==2.9.0 torchmetrics==1.9.0 \
  torch==2.13.0 faiss-cpu==1.15.1 numpy==1.26.4 scipy==1.14.1 \
  validators==0.36.0 gdown==6.5.1 pandas==3.0.6 matplotlib==3.11.2 omegaconf==2.4.0
"$work/venv/bin/pip" install --quiet --no-deps open-metric-learning==4.0.0

cat >"$work/metrics.py" <<'PYTHON'
import math

import numpy as np
import torch
from oml.functional.metrics import calc_retrieval_metrics
from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator
from torchmetrics import retrieval

ITEMS = 1000
CASES = {
    "ten of ten": [*range(100)],
    "the first": [0, *range(500, 599)],
    "the first and the tenth": [0, 9, *range(500, 598)],
    "without positives": [],
}


def pytorch_metric_learning(rows):
    labels = np.isin(np.arange(ITEMS), rows).astype(int)
    items = np.arange(1, ITEMS + 1, dtype=np.float32)[:, None]
    names = ("mean_average_precision", "precision_at_1")
    calculator = AccuracyCalculator(include=names, k=10, device=torch.device("cpu"))
    scores = calculator.get_accuracy(np.zeros((1, 1), np.float32), np.ones(1), items, labels)
    return [scores[name] for name in names]


def torchmetrics(rows):
    relevant = torch.from_numpy(np.isin(np.arange(ITEMS), rows))
    scores, query = torch.arange(ITEMS, 0, -1.0), torch.zeros(ITEMS, dtype=torch.long)
    metrics = retrieval.RetrievalMAP(top_k=10), retrieval.RetrievalPrecision(top_k=1)
    return [float(metric(scores, relevant, query)) for metric in metrics]


def open_metric_learning(rows):
    found, relevant = torch.arange(10), torch.tensor(rows, dtype=torch.long)
    scores = calc_retrieval_metrics(
        [found], [relevant], cmc_top_k=(1,), precision_top_k=(1,), map_top_k=(10,), verbose=False
    )
    return [float(scores["map"][10]), float(scores["precision"][1]), float(scores["cmc"][1])]


EXPECTED = {
    pytorch_metric_learning: [0.1, 0.01, 0.012, [math.nan, math.nan]],
    torchmetrics: [1, 1, 0.6, [0, 0]],
    open_metric_learning: [1, 1, 0.6, [0, math.nan, 0]],
}
for library, values in EXPECTED.items():
    for (case, rows), expected in zip(CASES.items(), values, strict=True):
        scores = library(rows)
        print(f"{library.__name__}, {case}: {scores}")
        shown = scores if isinstance(expected, list) else scores[0]
        np.testing.assert_allclose(shown, expected, atol=1e-6, err_msg="this has changed")
PYTHON
"$work/venv/bin/python" -W ignore "$work/metrics.py"
echo "as described: two kinds of MAP@10, and several answers for queries without positives"
