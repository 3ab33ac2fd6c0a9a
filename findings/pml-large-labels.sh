#!/usr/bin/env bash
# pytorch-metric-learning compares labels as float32, so that large whole numbers merge.
#
# Versions: pytorch-metric-learning 2.9.0, torch 2.13.0, faiss-cpu 1.15.1.
#
# Source: `AccuracyCalculator.get_accuracy` takes labels of any integer type
# (https://kevinmusgrave.github.io/pytorch-metric-learning/accuracy_calculation/) and casts them to
# float32, which holds whole numbers up to 2^24.
#
# Input: eight pairs of neighbours on a line, each of two classes that occur twice, so that no
# image's neighbour is of its class. Classes are numbered from 0 and, as ids of a database may be, from 2^24.
#
# Expected: precision@1 is 0 in both cases.
#
# Seen: it is 0 from 0 on, and 0.75 from 2^24 on, without a warning.
#
# Why it matters: product ids of shops, dates and hashes are labels above 2^24, and errors make
# scores better. hypjax compares labels as they are.
#
# The script exits with 0 while this is so, and with 1 once it has changed.
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet pytorch-metric-learning==2.9.0 torch==2.13.0 \
  faiss-cpu==1.15.1 numpy==2.4.6

cat >"$work/labels.py" <<'PYTHON'
import numpy as np
import torch
from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator

points = np.array([10 * pair + x for pair in range(8) for x in (0, 1)], np.float32)[:, None]
classes = np.array([0, 1, 3, 4, 7, 8, 2, 6] * 2)
calculator = AccuracyCalculator(include=("precision_at_1",), device=torch.device("cpu"))
seen = [calculator.get_accuracy(points, first + classes)["precision_at_1"] for first in (0, 2**24)]
print("precision@1 of classes numbered from 0 and from 2^24:", *seen)
if seen != [0, 0.75]:
    raise SystemExit("this has changed")
PYTHON
"$work/venv/bin/python" -W ignore "$work/labels.py"
echo "as described: labels above 2^24 merge"
