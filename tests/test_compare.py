"""One table of finished runs."""

import pathlib

import pytest

from hypjax.config import default_config, default_workdir, load_config, read_config
from hypjax.errors import UserError
from hypjax.runs.workdir import Workdir
from tests.helpers import commands

FIELD, CONFIG = "objective.c", "configs/glyphs.py:hyp"


@pytest.fixture
def compare(folder, capsys):
    """Runs the command, and returns the lines that it prints."""

    def run(*arguments):
        commands.call("compare", *arguments)
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
    workdir = Workdir(folder, config or default_config())
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
    assert compare(f"--config={CONFIG}", f"--field={FIELD}", *values) == []  # Other seed.
    assert compare(f"--config={CONFIG}", f"--field={FIELD}", *values, "--config.seed=1") == [
        "objective.c, recall on the validation images:",
        "recall@1 recall@10",
        "0.1 head 0.5000 0.5000",
        "0.3 head 0.2500 0.2500",
        "best: 0.1, by recall@1 of the head on the validation images",
        "objective.c, recall on the test images (to report, not to choose by):",
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
    assert title == "seed, recall on the test images:"
    assert table[4:6] == ["mean head 0.6500", "std head 0.1323"]
