#!/usr/bin/env bash
# Documents of equal score are ordered in three ways, two of them in one package.
#
# Versions: ranx 0.3.21 with numba 0.68.1, pytrec-eval-terrier 0.5.11 (trec_eval), beir 2.2.0.
#
# Source: trec_eval ignores the order of a run's lines, and sorts by descending score, then by
# descending name of the document (`form_res_rels.c`). beir's `EvaluateRetrieval.evaluate` calls it,
# and `evaluate_custom` sorts in Python, which keeps the order of ties. ranx's page says that its
# metrics were tested against trec_eval (https://github.com/AmenRa/ranx).
#
# Input: a query with documents of equal score, listed by ascending name, of which the first is
# relevant; 15, 16 and 40 documents. Then two whose scores are 1 + 1e-9 and 1.
#
# Expected: one order, which the manual states.
#
# Seen: by trec_eval, the relevant document comes last. By beir, it comes last in P@1, NDCG and MAP,
# and first in MRR and Accuracy@1. By ranx, it comes first among 15, in place 15 of 16 and in place
# 21 of 40: the sort is stable up to 15 documents. trec_eval compares in float32, so that
# 1 + 1e-9 and 1 are equal, and the better document may come second.
#
# Why it matters: scores in float16, Hamming distances, copies of images and collapsed embeddings
# have many ties, and scores then tell how documents are named or listed. hypjax keeps the gallery's
# order.
#
# The script exits with 0 while this is so, and with 1 once it has changed.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet ranx==0.3.21 numba==0.68.1 numpy==2.4.6 scipy==1.17.1 \
  pandas==3.1.1 pytrec-eval-terrier==0.5.11 tqdm==4.70.1
# beir's models ask for PyTorch, its scores do not.
"$work/venv/bin/pip" install --quiet --no-deps beir==2.2.0

cat >"$work/ties.py" <<'PYTHON'
import pytrec_eval
import ranx
from beir.retrieval.evaluation import EvaluateRetrieval


def places(scores):
    """Place of the relevant document d00, and whether beir's metrics have it first."""
    run = {"q": {f"d{i:02}": score for i, score in enumerate(scores)}}
    relevant = {"q": {"d00": 1}}
    trec = pytrec_eval.RelevanceEvaluator(relevant, {"recip_rank"}).evaluate(run)
    by_ranx = ranx.evaluate(ranx.Qrels(relevant), ranx.Run(run), "mrr")
    precision = EvaluateRetrieval.evaluate(relevant, run, [1])[3]["P@1"]
    accuracy = EvaluateRetrieval.evaluate_custom(relevant, run, [1], "accuracy")["Accuracy@1"]
    place = round(1 / trec["q"]["recip_rank"]), round(1 / by_ranx)
    return {"trec_eval": place[0], "ranx": place[1], "beir": (precision, accuracy)}


EXPECTED = {
    15: {"trec_eval": 15, "ranx": 1, "beir": (0, 1)},
    16: {"trec_eval": 16, "ranx": 15, "beir": (0, 1)},
    40: {"trec_eval": 40, "ranx": 21, "beir": (0, 1)},
}
has_changed = False
for documents, expected in EXPECTED.items():
    seen = places([1.0] * documents)
    print(f"{documents} documents: place by trec_eval and ranx; P@1, Accuracy@1 by beir: {seen}")
    has_changed |= seen != expected
close = places([1 + 1e-9, 1.0])
print("scores of 1 + 1e-9 and 1:", close)
if has_changed or close != {"trec_eval": 2, "ranx": 1, "beir": (0, 1)}:
    raise SystemExit("this has changed")
PYTHON
"$work/venv/bin/python" -W ignore "$work/ties.py"
echo "as described: three orders of documents of equal score"
