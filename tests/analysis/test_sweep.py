"""Figures of sweeps: which runs share a line, where points are, and what is refused."""

import json
import pathlib

import pytest

from hypjax.analysis.sweep import FinishedRun, curves, draw
from hypjax.config import default_config, flatten
from hypjax.errors import UserError

TEMPERATURE = "objective.temperature"
_RECIPE = default_config()


def run(score=0.5, *, name="a run", validation=None, **fields):
    """A run with other fields than the recipe; TEMPERATURE is written objective__temperature."""
    config = _RECIPE.copy_and_resolve_references()
    config.update_from_flattened_dict({k.replace("__", "."): v for k, v in fields.items()})
    recalls = [None if x is None else {"head": {"recall@1": x}} for x in (validation, score)]
    return FinishedRun(name, pathlib.Path(name), flatten(config), *recalls)


def of_values(*values, **fields):
    return [run(objective__temperature=value, **fields) for value in values]


def test_there_is_a_line_for_each_combination_of_the_other_fields():
    runs = of_values(0.1, 0.2, objective__c=0.3) + of_values(0.2, 0.1, objective__c=0.1)
    runs += of_values(0.1, objective__c=0.3, optim__learning_rate=2e-3, seed=3, name="mine")
    rate = _RECIPE.optim.learning_rate
    assert {label: list(curve) for label, curve in curves(runs, TEMPERATURE).items()} == {
        f"objective.c=0.1, optim.learning_rate={rate}": [0.1, 0.2],
        f"objective.c=0.3, optim.learning_rate={rate}": [0.1, 0.2],
        "objective.c=0.3, optim.learning_rate=0.002": [0.1],
    }


def test_fields_that_a_run_does_not_use_neither_split_lines_nor_appear():
    sphere = {"objective__space": "sphere", "objective__clip_radius": None}
    runs = of_values(0.1, objective__c=0.5, **sphere) + of_values(0.2, objective__c=2.0, **sphere)
    assert list(curves(runs, TEMPERATURE)) == [""]
    runs += of_values(0.1, 0.2, objective__c=0.1) + of_values(0.1, 0.2, objective__c=0.3)
    assert list(curves(runs, TEMPERATURE)) == [
        "objective.space=poincare, objective.c=0.1",
        "objective.space=poincare, objective.c=0.3",
        "objective.space=sphere",
    ]


def test_points_are_means_with_bars_from_the_lowest_to_the_highest(tmp_path, figures):
    scores = (0.25, 0), (1.0, 1)
    runs = [run(score, seed=seed, validation=0.75) for score, seed in scores]
    draw({"": [*runs, run(0.5, objective__temperature=0.8)]}, TEMPERATURE, tmp_path / "sweep.png")
    validation, test = figures[0].axes
    [(line, *_)] = validation.containers
    assert line.get_xydata().tolist() == [[0.2, 0.75]]
    [(line, _, [bars])] = test.containers
    assert line.get_xydata().tolist() == [[0.2, 0.625], [0.8, 0.5]]
    ends = [bar.tolist() for bar in bars.get_segments()]
    assert ends == [[[0.2, 0.25], [0.2, 1.0]], [[0.8, 0.5], [0.8, 0.5]]]


def test_temperatures_of_the_sphere_are_drawn_in_the_cosines_unit(tmp_path, figures):
    """Of the same logits cos/τ: the sphere's distance 2 − 2cos is divided by 2τ."""
    sphere = of_values(0.1, 0.4, objective__space="sphere", name="sphere")
    draw({"sphere": sphere, "ball": of_values(0.05, 0.2)}, TEMPERATURE, tmp_path / "sweep.png")
    (axes,) = figures[0].axes
    lines = {line.get_label(): line[0].get_xdata().tolist() for line in axes.containers}
    assert lines == {"sphere": [0.05, 0.2], "ball": [0.05, 0.2]}
    assert axes.get_xlabel() == f"{TEMPERATURE} (on the sphere, of the cosine)"
    captions = [run(objective__temperature=0.4, objective__space="sphere")]
    captions[0].settings["objective.name"] = "captions"
    assert [*curves(captions, TEMPERATURE, halved=True)[""]] == [0.2]
    draw({"": sphere}, TEMPERATURE, tmp_path / "sphere.png")
    assert figures[1].axes[0].containers[0][0].get_xdata().tolist() == [0.1, 0.4]


def test_a_metric_of_training_is_drawn_as_its_mean_over_the_steps(tmp_path, figures):
    runs = []
    for name, value, logged in (("a", 0.1, (2, 4, None)), ("b", 0.2, (5,)), ("c", 0.3, ())):
        (tmp_path / name).mkdir()
        logged = zip((10, 40, 50), logged, strict=False)
        lines = [json.dumps({"step": step, "spread": x}) for step, x in logged]
        (tmp_path / name / "metrics.jsonl").write_text("\n".join(lines))
        runs.append(run(objective__temperature=value, name=tmp_path / name))
    draw({"": runs}, TEMPERATURE, tmp_path / "spread.png", "spread")
    (axes,) = figures[0].axes
    assert axes.containers[0][0].get_xydata().tolist() == [[0.1, 3.5], [0.2, 5]]
    assert axes.get_ylabel() == "spread"
    with pytest.raises(UserError, match=r"no run logged spred.*spread"):
        draw({"": runs}, TEMPERATURE, tmp_path / "spread.png", "spred")
