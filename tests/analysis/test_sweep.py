"""Figures of sweeps: which runs share a line, where points are, and what is refused."""

import pytest
from PIL import Image

from hypjax.analysis.sweep import Run, curves, draw
from hypjax.config import choose_objective, default_config
from hypjax.errors import UserError

TEMPERATURE = "objective.temperature"
_RECIPE = default_config()


def recalls(score):
    return score and {"head": {"recall@1": score}}


def run(score=0.5, *, name="a run", validation=None, objective=None, **fields):
    """A run with other fields than the recipe; TEMPERATURE is written objective__temperature."""
    config = _RECIPE.copy_and_resolve_references()
    if objective:
        choose_objective(config, objective)
    config.update_from_flattened_dict({k.replace("__", "."): v for k, v in fields.items()})
    return Run(name, config, recalls(validation), recalls(score))


def of_values(*values, **fields):
    return [run(objective__temperature=value, **fields) for value in values]


def labels(runs, field=TEMPERATURE):
    return list(curves(runs, field))


def test_there_is_a_line_for_each_combination_of_the_other_fields():
    runs = [
        *of_values(0.1, 0.2, objective__c=0.3, optim__learning_rate=1e-3),
        *of_values(0.2, 0.1, objective__c=0.1, optim__learning_rate=1e-3),
        *of_values(0.1, objective__c=0.3, optim__learning_rate=2e-3),
    ]
    found = curves(runs, TEMPERATURE)
    assert {label: list(curve) for label, curve in found.items()} == {
        "objective.c=0.1, optim.learning_rate=0.001": [0.1, 0.2],
        "objective.c=0.3, optim.learning_rate=0.001": [0.1, 0.2],
        "objective.c=0.3, optim.learning_rate=0.002": [0.1],
    }


def test_fields_that_a_run_does_not_use_neither_split_lines_nor_appear():
    sphere = {"objective__space": "sphere", "objective__clip_radius": None}
    runs = of_values(0.1, objective__c=0.5, **sphere) + of_values(0.2, objective__c=2.0, **sphere)
    assert labels(runs) == [""]
    runs += of_values(0.1, 0.2, objective__c=0.1)
    assert labels(runs) == ["objective.space=poincare", "objective.space=sphere"]
    runs += of_values(0.1, 0.2, objective__c=0.3)
    assert labels(runs) == [
        "objective.space=poincare, objective.c=0.1",
        "objective.space=poincare, objective.c=0.3",
        "objective.space=sphere",
    ]


def test_names_seeds_and_circumstances_do_not_split_lines():
    others = {"seed": 3, "name": "mine", "variant": "x", "run__microbatch": 4, "eval__ks": (1, 7)}
    found = curves([*of_values(0.1, 0.2), *of_values(0.1, **others)], TEMPERATURE)
    assert {value: len(runs) for value, runs in found[""].items()} == {0.1: 2, 0.2: 1}


@pytest.mark.parametrize(
    ("runs", "field", "message"),
    [
        ([run()], TEMPERATURE, "several values"),
        (
            [run(), run(name="mixed", objective="hypmix")],
            TEMPERATURE,
            "mixed do not depend .* objective.ball_temperature",
        ),
        (
            [run(), run(name="flat", objective__space="sphere")],
            "objective.c",
            "flat do not depend on a field objective.c",
        ),
    ],
)
def test_what_cannot_be_drawn_is_refused(tmp_path, runs, field, message):
    with pytest.raises(UserError, match=message):
        draw(runs, field, tmp_path / "sweep.png")
    assert not list(tmp_path.iterdir())


@pytest.fixture
def drawn(tmp_path, figures):
    """Draws runs, and returns the axes of the figure by title."""

    def drawn(runs, field):
        draw(runs, field, tmp_path / "sweep.png")
        assert Image.open(tmp_path / "sweep.png").width > 300
        return {axis.get_title().split()[0]: axis for axis in figures[0].axes}

    return drawn


def test_points_are_means_with_bars_from_the_lowest_to_the_highest(drawn):
    runs = [run(0.25, seed=0), run(1.0, seed=1), run(0.5, objective__temperature=0.8)]
    axes = drawn(runs, TEMPERATURE)
    assert list(axes) == ["test"]
    [(line, _, [bars])] = axes["test"].containers
    assert line.get_xydata().tolist() == [[0.2, 0.625], [0.8, 0.5]]
    found = [bar.tolist() for bar in bars.get_segments()]
    assert found == [[[0.2, 0.25], [0.2, 1.0]], [[0.8, 0.5], [0.8, 0.5]]]


def test_runs_with_validation_classes_are_drawn_in_a_first_panel(drawn):
    with_both = of_values(0.1, 0.2, objective__c=0.5, validation=0.75)
    axes = drawn([*with_both, *of_values(0.1, 0.2)], TEMPERATURE)
    assert list(axes) == ["validation", "test"]
    lines = {title: [c[0] for c in axis.containers] for title, axis in axes.items()}
    assert [line.get_ydata().tolist() for line in lines["validation"]] == [[], [0.75, 0.75]]
    assert [line.get_ydata().tolist() for line in lines["test"]] == [[0.5, 0.5], [0.5, 0.5]]
    assert len({line.get_color() for line in lines["test"]}) == 2
    assert len({line.get_marker() for line in lines["test"]}) == 2


@pytest.mark.parametrize(
    ("field", "values", "places", "ticks"),
    [
        (TEMPERATURE, (1.0, 0.05, 0.2), [0.05, 0.2, 1.0], ["0.05", "0.2", "1.0"]),
        ("objective.c", (0.0, 0.01, 1.0), [0.0, 0.01, 1.0], ["0.0", "0.01", "1.0"]),
        ("objective.clip_radius", (None, 2.3, 1.0), [0, 1, 2], ["1.0", "2.3", "None"]),
        ("eval.scales", ((1.0,), (0.7, 1.0)), [0, 1], ["0.7,1.0", "1.0"]),
    ],
    ids=["logarithmic", "linear", "no number", "lists"],
)
def test_the_axis_suits_the_values(drawn, field, values, places, ticks):
    axis = drawn([run(**{field.replace(".", "__"): value}) for value in values], field)["test"]
    assert axis.get_xlabel() == field
    assert axis.get_xscale() == ("log" if len(places) == 3 and field == TEMPERATURE else "linear")
    [line] = [container[0] for container in axis.containers]
    assert line.get_xdata().tolist() == places
    assert [label.get_text() for label in axis.get_xticklabels()][:3] == ticks
