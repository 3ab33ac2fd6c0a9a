"""Runs: what they leave, how they resume, and what they refuse."""

import json
import shutil

import numpy as np
import pytest
from PIL import Image

from hypjax import load, train
from hypjax.errors import UserError
from hypjax.evaluate import evaluate
from hypjax.geometry import Sphere
from hypjax.retrieval import prefix_points
from hypjax.runs.workdir import Workdir, saved_config
from tests.helpers.small_runs import interrupted_after, step_metrics
from tests.training.test_interruptions import assert_same_run


def test_a_run_leaves_results_times_and_a_model(run, capsys):
    config, results = saved_config(run), json.loads((run / "results.json").read_text())
    for recalls in (results["untrained"], results["final"], results["validation"]["final"]):
        assert recalls.keys() == {"head", "encoder"}
        for values in recalls.values():
            assert list(values) == ["recall@1", "recall@2"]
            assert all(0 < value < 1 for value in values.values())
    times = json.loads((run / "times.json").read_text())
    total = times["seconds"].pop("total")
    assert sum(times["seconds"].values()) == pytest.approx(total, abs=0.01)
    best = {"final": results["final"], "best": results["best"]}
    assert evaluate(config, run) == best
    assert train.train_and_evaluate(config, run) == results
    assert "already" in capsys.readouterr().out
    changed = saved_config(run)
    changed.seed, changed.eval.ks = 5, (1, 17)
    changed.eval.metrics = ("recall", "precision", "map@r")
    other = evaluate(changed, run)["final"]["head"]
    assert list(other) == ["recall@1", "recall@17", "precision@1", "precision@17", "map@r"]
    assert other["recall@1"] == other["precision@1"] > other["map@r"]
    assert other["recall@1"] == results["final"]["head"]["recall@1"] < other["recall@17"]
    changed.eval.ks = (1, 9999)
    with pytest.raises(UserError, match="eval.ks holds 9999"):
        evaluate(changed, run)


def test_a_run_with_unknown_fields_is_not_evaluated(run, tmp_path):
    config, copy = saved_config(run), shutil.copytree(run, tmp_path / "run")
    saved = json.loads((copy / "config.json").read_text())
    saved["all"]["train.unknown"] = 1
    (copy / "config.json").write_text(json.dumps(saved))
    with pytest.raises(UserError, match="config.json is damaged .*unknown"):
        evaluate(config, copy)


def test_an_interrupted_run_ends_as_an_undisturbed_one(run, tmp_path):
    """Every number that it logs and saves, bit for bit, although a checkpoint precedes its end."""
    train.train_and_evaluate(saved_config(run), tmp_path)
    assert_same_run(tmp_path, run, least=40)
    assert step_metrics(tmp_path) == step_metrics(run)


@pytest.mark.slow
def test_a_run_that_is_not_finished_is_evaluated_at_its_last_state(load_glyphs, tmp_path, capsys):
    config = load_glyphs("run.checkpoint_every=3")
    with interrupted_after(4):
        train.train_and_evaluate(config, tmp_path)
    halfway = evaluate(config, tmp_path)
    results = train.train_and_evaluate(config, tmp_path)
    assert "final" not in halfway and halfway["step 3"] != results["final"]
    told = capsys.readouterr().err
    assert "continuing after step 3" in told and " s in all: " in told


def test_a_folder_of_another_run_is_refused(load_glyphs, tmp_path):
    with Workdir(tmp_path, load_glyphs()).claimed({}):
        pass
    with pytest.raises(UserError, match=r"another configuration \(seed: 0 -> 1\)"):
        train.train_and_evaluate(load_glyphs("seed=1"), tmp_path)
    with pytest.raises(UserError, match="load_head=True starts from this run's model"):
        Workdir(tmp_path, load_glyphs("train.total_steps=12"))
    with pytest.raises(UserError, match=r"another configuration \(model.depth: 1 -> 2\)"):
        evaluate(load_glyphs("model.depth=2"), tmp_path)
    Workdir(tmp_path, load_glyphs("run.workers=1"))


def test_folders_that_are_no_runs_are_refused(load_glyphs, tmp_path):
    """Nothing says of which configuration their checkpoints are."""
    (tmp_path / "checkpoints/5").mkdir(parents=True)
    with pytest.raises(UserError, match="holds a run without its config.json"):
        train.train_and_evaluate(load_glyphs(), tmp_path)


@pytest.mark.slow
def test_a_loss_of_prefixes_is_trained_and_its_prefixes_are_scored_and_embed(load_glyphs, tmp_path):
    fields = ("objective.name=matryoshka+proxy_anchor", "objective.dims=2,4")
    config = load_glyphs(*fields, "objective.space=sphere", "objective.proxy_rate=1")
    results = train.train_and_evaluate(config, tmp_path)
    parts = ["head", "head@2", "head@4", "encoder"]
    assert list(results["final"]) == list(results["validation"]["best"]) == parts
    lines = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    logged = [line for line in lines if "loss" in line]
    assert all(line["loss"] > line["loss@2"] + line["loss@4"] > 0 for line in logged) and logged
    images = np.random.default_rng(0).integers(0, 256, (3, 32, 32, 1), np.uint8)
    images = [Image.fromarray(image[..., 0]) for image in images]
    whole, short = (load(tmp_path, part).embed(images) for part in ("head", "head@4"))
    np.testing.assert_allclose(prefix_points(whole, 4, space=Sphere()), short, atol=1e-5)
