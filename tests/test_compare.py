"""One table of finished runs."""

import json
import os
import subprocess
import sys

import pytest

from hypjax.config import default_workdir, load_config, read_config

FIELD, CONFIG = "objective.c", "configs/glyphs.py:hyp"


@pytest.fixture
def compare(repository, tmp_path):
    (tmp_path / "configs").symlink_to(repository / "configs")

    def run(*args):
        return subprocess.run(
            [sys.executable, "-m", "hypjax.compare", *args],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(repository)},
            capture_output=True,
            text=True,
            timeout=60,
        )

    return run


def finish(folder, *, best=None, validation=None, ks=(1, 10), **final):
    """Writes the results of a run, whose recalls are the same at every K."""
    results = {"final": {part: {f"recall@{k}": x for k in ks} for part, x in final.items()}}
    results["untrained"] = results["final"]
    if best is not None:
        results["best"] = {part: {f"recall@{k}": best for k in ks} for part in final}
    if validation is not None:
        results["validation"] = {"final": {"head": {f"recall@{k}": validation for k in ks}}}
    folder.mkdir(parents=True)
    (folder / "results.json").write_text(json.dumps(results))


def rows(done):
    assert done.returncode == 0, done.stderr
    return [line.split() for line in done.stdout.splitlines()]


def test_runs_are_compared_by_their_best_or_last_recalls(compare, tmp_path):
    finish(tmp_path / "runs/a", head=0.25, encoder=0.5)
    finish(tmp_path / "runs/b", head=0.75, encoder=0.5, best=0.875, ks=(1, 100))
    title, *table = rows(compare("runs/a", "runs/b"))
    assert " ".join(title) == "recall on the test classes:"
    assert table == [
        ["recall@1"],
        ["runs/a", "head", "0.2500"],
        ["runs/a", "encoder", "0.5000"],
        ["runs/b", "head", "0.8750"],
        ["runs/b", "encoder", "0.8750"],
    ]


def test_runs_that_differ_in_a_field_are_found_in_their_default_folders(
    compare, tmp_path, repository
):
    spec = str(repository / CONFIG)
    for value, recall in (("0.1", 0.5), ("0.3", 0.75)):
        config = load_config(spec, ["seed=1", f"{FIELD}={value}"])
        folder = tmp_path / default_workdir(config, read_config(spec))
        finish(folder, head=recall, validation=1 - recall)
    values = [f"--value={value}" for value in ("0.1", "0.2", "0.3")]
    assert rows(compare(f"--config={CONFIG}", f"--field={FIELD}", *values)) == []  # Other seed.
    printed = compare(f"--config={CONFIG}", f"--field={FIELD}", *values, "--config.seed=1")
    assert [" ".join(row) for row in rows(printed)] == [
        "objective.c, recall on the validation classes:",
        "recall@1 recall@10",
        "0.1 head 0.5000 0.5000",
        "0.3 head 0.2500 0.2500",
        "best: 0.1, by recall@1 of the head on the validation classes",
        "objective.c, recall on the test classes (to report, not to choose by):",
        "recall@1 recall@10",
        "0.1 head 0.5000 0.5000",
        "0.3 head 0.7500 0.7500",
    ]


def test_seeds_are_summarised_by_mean_and_standard_deviation(compare, tmp_path, repository):
    spec = str(repository / CONFIG)
    for seed, recall in ((0, 0.5), (1, 0.75), (2, 0.7)):
        config = load_config(spec, [f"seed={seed}"])
        finish(tmp_path / default_workdir(config, read_config(spec)), head=recall, ks=(1,))
    values = [f"--value={seed}" for seed in range(3)]
    title, _, *table = rows(compare(f"--config={CONFIG}", "--field=seed", *values))
    assert " ".join(title) == "seed, recall on the test classes:"
    assert table[3:] == [["mean", "head", "0.6500"], ["std", "head", "0.1323"]]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "--config is missing"),
        (["runs/none"], "no finished run in runs/none"),
        (["runs/a", f"--config={CONFIG}"], "name either the folders of runs or --config"),
        (
            [f"--config={CONFIG}", f"--field={FIELD}", "--value=x"],
            "config.objective.c is 'x'; it must be a finite number",
        ),
    ],
)
def test_errors_are_one_sentence(compare, args, message):
    done = compare(*args)
    assert done.returncode == 1 and done.stderr.startswith(f"error: {message}")
    assert len(done.stderr.splitlines()) == 1
