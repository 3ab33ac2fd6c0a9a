"""Scores by other libraries' metrics: equal to hypjax's, or explained by a row of the manual."""

import csv
import json
import pathlib
import re

import numpy as np
import pytest

from hypjax.integrations import metric_libraries
from tests.helpers import commands

pytest.importorskip("pytorch_metric_learning", reason="needs the parity extra")
ROWS = pathlib.Path(__file__).parents[2] / "docs" / "differences.csv"  # Of docs/differences.md.


def printed(folder, capsys, features, labels, *flags):
    """Lines of pytorch-metric-learning's metrics, and hypjax's scores."""
    np.savez(folder / "f.npz", features=features.astype(np.float32), labels=labels)
    files = f"--embeddings={folder}/f.npz", f"--output={folder}/s.json"
    commands.call("score", *files, "--compare=pml", *flags)
    _, _, table = capsys.readouterr().out.partition("\n\n")
    lines = [re.split(r"  +", line.strip()) for line in table.splitlines()]
    assert lines[0] == ["hypjax", "pml"]
    return {name: cells for name, *cells in lines[1:]}, json.loads((folder / "s.json").read_text())


def test_figures_of_pytorch_metric_learning_are_the_same_on_the_sphere(tmp_path, capsys):
    draw = np.random.default_rng(0)
    labels = np.repeat(np.arange(20), 5)
    features = draw.normal(size=(20, 8))[labels] + 2 * draw.normal(size=(100, 8))
    lines, scores = printed(tmp_path, capsys, features, labels)
    assert list(lines) == ["recall@1", "map@r", "r_precision"]
    for name, (_, ours, theirs, *why) in lines.items():
        assert ours == theirs == f"{scores[name]:.4f}" and not why
    queries = f"--queries={tmp_path}/f.npz", "--keep_self"
    lines, scores = printed(tmp_path, capsys, features, labels, *queries)
    assert scores["recall@1"] == 1 and all(x[1] == x[2] for x in lines.values())


@pytest.mark.parametrize(("first", "theirs"), [(0, 0.0), (2**24, 0.75)])
def test_labels_above_float32_are_compared_as_they_are(first, theirs, tmp_path, capsys):
    """Neighbours are of two classes each, of which float32 merges three pairs in four."""
    angles = np.array([0.5 * pair + x for pair in range(8) for x in (0, 0.1)])
    features = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    labels = first + np.array([0, 1, 3, 4, 7, 8, 2, 6] * 2)
    lines, scores = printed(tmp_path, capsys, features, labels)
    assert scores["recall@1"] == 0 and lines["recall@1"][2] == f"{theirs:.4f}"
    reasons = ["docs/differences.md: class numbers above 2^24 merge (#labels-as-floats)"]
    assert lines["recall@1"][3:] == reasons * bool(first)


def test_in_the_ball_the_difference_is_that_of_the_distance(tmp_path, capsys):
    draw = np.random.default_rng(0)
    labels = np.repeat(np.arange(20), 5)
    features = draw.normal(size=(20, 8))[labels] + draw.normal(size=(100, 8))
    flags = "--space=ball", "--c=1", "--clip_radius=0"
    lines, _ = printed(tmp_path, capsys, features, labels, *flags)
    differing = [cells for cells in lines.values() if cells[1] != cells[2]]
    assert differing and all("#flat-distances" in cells[3] for cells in differing)


def test_reasons_are_rows_of_the_manual():
    source = pathlib.Path(metric_libraries.__file__).read_text()
    named = re.findall(r"\(#([\w-]+)\)", source)
    with open(ROWS, newline="") as file:
        anchors = {row["anchor"] for row in csv.DictReader(file)}
    assert len(named) == 4 and {*named} <= anchors
