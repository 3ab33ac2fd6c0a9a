"""Variants compared with the settings that suit them best."""

import shlex

import pytest

from hypjax.errors import UserError
from tests.helpers import commands
from tests.helpers.pictures import write_pictures
from tests.test_compare import finish_default

CONFIG = "configs/glyphs.py"
GRIDS = (
    "--variant=hyp objective.c=0.1,0.3 objective.temperature=0.2",
    "--variant=sph objective.temperature=0.1,0.2",
)


@pytest.fixture
def tune(folder, capsys):
    """Runs the command, and returns the words of each line that it prints."""

    def run(*arguments):
        commands.call("tune", f"--config={CONFIG}", *arguments)
        return [shlex.split(line) for line in capsys.readouterr().out.splitlines()]

    return run


def test_settings_are_tried_with_one_seed_and_the_best_ones_with_all(tune):
    """Chosen by the validation classes, though other settings are better on the test classes."""
    finish_default(f"{CONFIG}:hyp", "objective.c=0.1", head=0.9, validation=0.5)
    finish_default(f"{CONFIG}:sph", "objective.temperature=0.1", head=0.5, validation=0.7)
    settings = "objective.c=0.3", "objective.temperature=0.2", "seed=0"
    first = [f"--config.{setting}" for setting in settings]
    assert tune(*GRIDS, "--pending", "--seeds=0,4") == [
        [f"--config={CONFIG}:hyp", *first],
        [f"--config={CONFIG}:sph", *first[1:]],
    ]
    with pytest.raises(UserError, match="unfinished runs: 2"):
        tune(*GRIDS)
    with pytest.raises(UserError, match="as many settings"):
        tune(GRIDS[0], "--variant=sph", "--pending")
    finish_default(f"{CONFIG}:hyp", "objective.c=0.3", head=0.8, validation=0.6)
    finish_default(f"{CONFIG}:sph", head=0.9, validation=0.6)
    second = tune(*GRIDS, "--pending", "--seeds=0,4")
    assert [words[:2] + words[-1:] for words in second] == [
        ["--config=configs/glyphs.py:hyp", "--config.objective.c=0.3", "--config.seed=4"],
        ["--config=configs/glyphs.py:sph", "--config.objective.temperature=0.1", "--config.seed=4"],
    ]


def test_runs_that_cannot_be_chosen_among_are_refused_before_the_first(folder, tmp_path):
    path = write_pictures(tmp_path / "photos", [f"{c}/{i}.png" for c in "abcdefg" for i in "12345"])
    none, images = "data.validation_classes=0", "data.split=images"
    for grid, fields, sentence in (
        ("0.1,0.2", [none], "data.validation_classes=2, or name one"),
        ("0.1,0.2", [], "data.validation_classes=2, or name one"),  # A share of five classes.
        ("0.1,0.2", [images, none], "validation_classes=0.1"),
        ("0.1,0.2", [images], "add images, or name one"),
        ("0.1 data.split_seed=0,1", [], "runs differ in data.split_seed"),
        ("0.1 eval.ks=1,2", [], "runs differ in eval.ks"),
    ):
        fields = [f"--config.{field}" for field in (f"data.path={path}", *fields)]
        variant = f"--variant=hyp-scratch objective.temperature={grid}"
        with pytest.raises(UserError, match=sentence):
            commands.call("tune", "--config=configs/folder.py", variant, "--pending", *fields)


def test_one_setting_for_each_variant_needs_no_validation(tune):
    variants = "--variant=hyp", "--variant=sph"
    lines = tune(*variants, "--pending", "--seeds=0,1", "--config.data.validation_classes=0")
    assert [line[-1] for line in lines] == ["--config.seed=0", "--config.seed=1"] * 2
