"""One table of finished runs, and variants compared with the settings that suit them best."""

import pathlib
import shlex

import pytest

from hypjax.config import default_config, default_workdir, flatten, load_config, read_config
from hypjax.errors import UserError
from hypjax.runs.workdir import Workdir
from tests.helpers import commands
from tests.helpers.pictures import write_pictures

FIELD, FILE, CONFIG = "objective.c", "configs/glyphs.py", "configs/glyphs.py:hyp"


@pytest.fixture
def compare(folder, capsys):
    """Runs the command, and returns the lines that it prints."""

    def run(*arguments, to="compare"):
        commands.call(to, *arguments)
        return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]

    return run


def finish(folder, *, best=None, validation=None, ks=(1, 10), config=None, images="a", **final):
    """Writes the files of a finished run, whose recalls are the same at every K."""
    results = {"final": {part: {f"recall@{k}": x for k in ks} for part, x in final.items()}}
    results["untrained"] = results["final"]
    if best is not None:
        results["best"] = {part: {f"recall@{k}": best for k in ks} for part in final}
    if validation is not None:
        results["validation"] = {"final": {"head": {f"recall@{k}": validation for k in ks}}}
    workdir = Workdir(folder, flatten(config or default_config()))
    with workdir.locked({"images": images}):
        workdir.write_results(results)


def finish_default(spec, *fields, **scores):
    """Writes those of a configuration's run into its default folder."""
    config = load_config(spec, fields)
    finish(pathlib.Path(default_workdir(config, read_config(spec))), config=config, **scores)


def test_runs_are_compared_by_their_best_or_last_recalls(compare, tmp_path):
    finish(tmp_path / "runs/a", head=0.25)
    finish(tmp_path / "runs/b", head=0.75, best=0.875, ks=(1, 100))
    table = compare("runs/a", "runs/b")[1:]
    assert table == ["recall@1", "runs/a head 0.2500", "runs/b head 0.8750"]


def test_runs_that_differ_in_a_field_are_found_in_their_default_folders(compare):
    finish_default(CONFIG, "seed=1", f"{FIELD}=0.1", head=0.5, validation=0.5)
    finish_default(CONFIG, "seed=1", f"{FIELD}=0.3", head=0.75, validation=0.25)
    values = [f"--value={value}" for value in ("0.1", "0.2", "0.3")]
    with pytest.raises(UserError, match="none of the runs is finished"):  # Of another seed.
        compare(f"--config={CONFIG}", f"--field={FIELD}", *values)
    assert compare(f"--config={CONFIG}", f"--field={FIELD}", *values, "--config.seed=1") == [
        "objective.c, scores on the validation images:",
        "recall@1 recall@10",
        "0.1 head 0.5000 0.5000",
        "0.3 head 0.2500 0.2500",
        "best: 0.1, by recall@1 of the head on the validation images",
        "objective.c, scores on the test images (to report, not to choose by):",
        "recall@1 recall@10",
        "0.1 head 0.5000 0.5000",
        "0.3 head 0.7500 0.7500",
        "folders:",
        "0.1 runs/glyphs-hyp-seed=1",
        "0.3 runs/glyphs-hyp-c=0.3+seed=1",
    ]


def test_a_tie_is_not_presented_as_a_choice(compare):
    for value, score in (("0.1", 0.4), ("0.3", 0.5), ("0.5", 0.5)):
        finish_default(CONFIG, f"{FIELD}={value}", head=0.5, validation=score)
    values = [f"--value={value}" for value in ("0.1", "0.3", "0.5")]
    printed = "\n".join(compare(f"--config={CONFIG}", f"--field={FIELD}", *values))
    assert "tie: 0.3, 0.5, by recall@1" in printed and "best" not in printed


def test_runs_on_different_datasets_are_refused(compare, tmp_path):
    for name, path, images in (("a", "photos", "b"), ("moved", "/elsewhere", "b"), ("c", "x", "a")):
        config = load_config("configs/folder.py", [f"data.path={path}"])
        finish(tmp_path / name, head=0.5, config=config, images=images)
    compare("a", "moved")
    with pytest.raises(UserError, match="a and c have different"):
        compare("a", "c")


def test_seeds_are_summarised_by_mean_and_standard_deviation(compare):
    for seed, recall in ((0, 0.5), (1, 0.75), (2, 0.7)):
        finish_default(CONFIG, f"seed={seed}", head=recall, ks=(1,))
    values = [f"--value={seed}" for seed in range(3)]
    title, *table = compare(f"--config={CONFIG}", "--field=seed", *values)
    assert title == "seed, scores on the test images:"
    assert table[4:6] == ["mean head 0.6500", "std head 0.1323"]


GRIDS = (
    "--variant=hyp objective.c=0.1,0.3 objective.temperature=0.2",
    "--variant=sph objective.temperature=0.1,0.2",
)


@pytest.fixture
def tune(compare):
    """Runs the command, and returns the words of each line that it prints."""
    return lambda *arguments: [
        *map(shlex.split, compare(f"--config={FILE}", *arguments, to="tune"))
    ]


def test_settings_are_tried_with_one_seed_and_the_best_ones_with_all(tune):
    """Chosen by the validation classes, though other settings are better on the test classes."""
    finish_default(f"{FILE}:hyp", "objective.c=0.1", head=0.9, validation=0.5)
    finish_default(f"{FILE}:sph", "objective.temperature=0.1", head=0.5, validation=0.7)
    settings = "objective.c=0.3", "objective.temperature=0.2", "seed=0"
    first = [f"--config.{setting}" for setting in settings]
    assert tune(*GRIDS, "--pending", "--seeds=0,4") == [
        [f"--config={FILE}:hyp", *first],
        [f"--config={FILE}:sph", *first[1:]],
    ]
    with pytest.raises(UserError, match="unfinished runs: 2"):
        tune(*GRIDS)
    with pytest.raises(UserError, match="equally many settings"):
        tune(GRIDS[0], "--variant=sph", "--pending")
    finish_default(f"{FILE}:hyp", "objective.c=0.3", head=0.8, validation=0.6)
    finish_default(f"{FILE}:sph", head=0.9, validation=0.6)
    assert [words[:2] + words[-1:] for words in tune(*GRIDS, "--pending", "--seeds=0,4")] == [
        ["--config=configs/glyphs.py:hyp", "--config.objective.c=0.3", "--config.seed=4"],
        ["--config=configs/glyphs.py:sph", "--config.objective.temperature=0.1", "--config.seed=4"],
    ]


def test_runs_that_cannot_be_chosen_among_are_refused_before_the_first(folder, tmp_path):
    path = write_pictures(tmp_path / "photos", [f"{c}/{i}.png" for c in "abcdefg" for i in "12345"])
    none, images = "data.validation_classes=0", "data.split=images"
    for grid, fields, sentence in (
        ("0.1,0.2", [none], "data.validation_classes=2, or name one"),
        ("0.1,0.2", [], "data.validation_classes=2, or name one"),  # A share of five classes.
        ("0.1,0.2", [images, none], "add images, or name one"),
        ("0.1,0.2", [images], "add images, or name one"),
        ("0.1,0.2", ["data.validation_classes=4"], "4 of 5 classes.*set it to 2 to 3"),
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


def test_runs_like_another_are_found_by_what_they_are(compare, tmp_path):
    """Whatever their names; other losses, curvatures and images are left out."""
    temperature, sphere = "objective.temperature", f"{FILE}:sph"
    finish_default(CONFIG, head=0.1)  # The default temperature, 0.2, is not in its name.
    finish_default(CONFIG, f"{temperature}=0.3", head=0.3)
    finish(tmp_path / "runs/mine", head=0.5, config=load_config(CONFIG, [f"{temperature}=0.5"]))
    finish(tmp_path / "runs/glyphs-hyp-x", head=0.9, config=load_config(CONFIG), images="b")
    finish_default(CONFIG, f"{FIELD}=0.3", head=0.6)
    finish_default(f"{FILE}:supcon", head=0.7)
    finish_default(sphere, f"{temperature}=0.4", head=0.4)
    like = "--like=runs/glyphs-hyp", f"--vary={temperature}"
    title, header, *rows = compare(*like)
    assert rows == [
        *(
            "runs/glyphs-hyp head 0.1000 0.1000",
            "runs/glyphs-hyp-temperature=0.3 head 0.3000 0.3000",
        ),
        "runs/mine head 0.5000 0.5000",
    ]
    assert len(compare(*like, f"--vary={FIELD}")) == 6
    # A sphere uses no curvature, so that it is no difference.
    spheres = compare(*like, "--vary=objective.space")
    assert len(spheres) == 6 and "runs/glyphs-sph-temperature=0.4 head 0.4000 0.4000" in spheres
    for arguments, sentence in (
        (like[:1], "--like and --vary go together"),
        ((*like, "runs/mine"), "either the folders of runs, --like or --config"),
        ((like[0], "--vary=objective.temprature"), r"no field objective.temprature.*temperature"),
        (("--like=runs/none", like[1]), "no finished run in runs/none"),
    ):
        with pytest.raises(UserError, match=sentence):
            compare(*arguments)
