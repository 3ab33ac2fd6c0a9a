"""hypjax.main, in this process; slow tests run it as a command of its own."""

import json

import pytest

from tests.helpers import commands, small_runs


@pytest.fixture
def features(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = small_runs.write_features(tmp_path / "features.npz")
    fields = [*small_runs.SHORT_FEATURES, f"data.path={path}"]
    return ["--config=features", *(f"--config.{field}" for field in fields)]


def test_trains_prints_its_results_again_and_evaluates(features, tmp_path, capsys):
    def printed(*arguments):
        commands.call("main", *arguments)
        return capsys.readouterr().out

    shown = [line.split() for line in printed(*features, "--workdir=run").splitlines()]
    results = json.loads((tmp_path / "run/results.json").read_text())
    final = [f"{value:.4f}" for value in results["final"]["head"].values()]
    assert ["final", "head", *final] in shown
    assert "already" in printed(*features, "--workdir=run")
    further = ["--config.eval.spaces.head=objective,sphere", "--config.eval.metrics=recall,map"]
    further.append("--config.eval.prefixes=4")
    evaluated = printed(*features, "--workdir=run", "--mode=evaluate", *further)
    names, *rows = [line.split() for line in evaluated.splitlines()[1:6]]
    assert names[-1] == "map" and rows[0][2:-1] == final
    assert [row[0] for row in rows] == 4 * ["final"]
    assert [row[1] for row in rows] == ["head", "head:sphere", "head@4", "head@4:sphere"]
    further.append("--output=scores.json")
    assert printed("--workdir=run", "--mode=evaluate", *further) == evaluated
    scores = json.loads((tmp_path / "scores.json").read_text())
    assert scores["final"]["head"].items() >= results["final"]["head"].items()
    fields = printed(*features, "--print", "--config.seed=3").splitlines()
    (line,) = (line for line in fields if "config.seed " in line)
    assert line.split()[1:] == ["3", "command", "line"]
