#!/usr/bin/env bash
# torchmetrics counts relevant items with a score of 0 or below as missed, in four of its metrics.
#
# Versions: torchmetrics 1.9.0, torch 2.13.0.
#
# Source: its pages call `preds` probabilities that a document is relevant
# (https://lightning.ai/docs/torchmetrics/stable/retrieval/map.html); nothing checks it, and an
# average precision depends on the order of scores only.
#
# Input: five items with distances 0.1 to 0.5, of which the nearest two are relevant: a perfect
# ranking. Scores are the negated distances and, as a control, 1 minus the distances.
#
# Expected: the same values for both, 1 for a perfect ranking.
#
# Seen: by negated distances, MAP, MRR, precision and recall are 0; hit rate, R-precision and NDCG
# are 1. By 1 minus the distances, all are 1.
#
# Why it matters: negated distances, inner products and cosines are the scores of image retrieval.
# A table of such metrics looks like a model that finds nothing, or, for cosines, a little worse.
# hypjax ranks by distances.
#
# The script exits with 0 while this is so, and with 1 once it has changed.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet torchmetrics==1.9.0 torch==2.13.0 numpy==2.4.6

cat >"$work/metrics.py" <<'PYTHON'
import torch
from torchmetrics import retrieval

METRICS = {
    "MAP": retrieval.RetrievalMAP(),
    "MRR": retrieval.RetrievalMRR(),
    "precision@2": retrieval.RetrievalPrecision(top_k=2),
    "recall@2": retrieval.RetrievalRecall(top_k=2),
    "hit rate@2": retrieval.RetrievalHitRate(top_k=2),
    "R-precision": retrieval.RetrievalRPrecision(),
    "NDCG": retrieval.RetrievalNormalizedDCG(),
}
distances = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5])
relevant = torch.tensor([True, True, False, False, False])
query = torch.zeros(5, dtype=torch.long)
seen = {}
for name, metric in METRICS.items():
    values = [float(metric(scores, relevant, query)) for scores in (-distances, 1 - distances)]
    print(f"{name}: {values[0]:.2f} by negated distances, {values[1]:.2f} by 1 - distances")
    seen[name] = values
zero = {"MAP", "MRR", "precision@2", "recall@2"}
if seen != {name: [float(name not in zero), 1.0] for name in METRICS}:
    raise SystemExit("this has changed")
PYTHON
"$work/venv/bin/python" -W ignore "$work/metrics.py"
echo "as described: MAP, MRR, precision and recall of negated distances are 0"
