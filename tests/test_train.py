"""Runs, by the command and from Python: what they leave, how they resume, and what they refuse."""

import json
import shutil

import numpy as np
import pytest

from hypjax import train
from hypjax.config import flatten, load_config
from hypjax.errors import UserError
from hypjax.evaluate import evaluate
from hypjax.experiment.experiment import Experiment
from hypjax.runs.files import read_object
from hypjax.runs.workdir import Workdir, saved_config
from tests.helpers import commands, small_runs
from tests.helpers.small_runs import step_metrics
from tests.training.test_interruptions import assert_same_run, saved_arrays


def features_config(path, *overrides):
    """The configuration of a small run on features."""
    return load_config("features", [*small_runs.SHORT_FEATURES, f"data.path={path}", *overrides])


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


def test_a_run_trains_on_everything_with_the_settings_of_another(features, tmp_path, capsys):
    """Its model embeds; its commands that need test images are refused in one sentence."""
    commands.call("main", *features, "--workdir=run")
    everything = ["--config=run", "--config.data.split=none", "--workdir=final"]
    commands.call("main", *everything)
    results, untested = read_object(tmp_path / "final/results.json"), "nothing was measured"
    assert results["untrained"] == results["final"] == {} and untested in results["notes"][0]
    fields, tested = (flatten(saved_config(tmp_path / name)) for name in ("final", "run"))
    assert {name for name in fields if fields[name] != tested[name]} == {"data.split"}
    capsys.readouterr()
    commands.call("main", *everything)  # Finished already.
    out = capsys.readouterr().out
    assert "already" in out and untested in out and "Scores" not in out
    commands.call("embed", "--workdir=final", "--images=features.npz", "--output=gallery.npz")
    assert len(np.load("gallery.npz")["ids"]) == len(np.load("features.npz")["features"])
    refused = [("main", "--config=final", "--mode=evaluate"), ("compare", "run", "final")]
    for command in (*refused, ("plot", "disk", "--workdir=final", "--output=disk.png")):
        with pytest.raises(UserError, match=untested):
            commands.call(*command)


def test_a_run_leaves_results_times_and_a_model(run, capsys):
    config, results = saved_config(run), json.loads((run / "results.json").read_text())
    for recalls in (results["untrained"], results["final"], results["validation"]["final"]):
        assert recalls.keys() == {"head", "encoder"}
        for values in recalls.values():
            assert list(values) == ["recall@1", "recall@2"] and 0 < min(values.values()) < 1
    times = json.loads((run / "times.json").read_text())
    total = times["seconds"].pop("total")
    assert sum(times["seconds"].values()) == pytest.approx(total, abs=0.01)
    assert evaluate(config, run) == {"final": results["final"], "best": results["best"]}
    assert train.train_and_evaluate(config, run) == results
    assert "already" in capsys.readouterr().out
    changed = saved_config(run)
    changed.seed, changed.eval.ks, changed.eval.metrics = 5, (1, 17), ("recall", "precision")
    other = evaluate(changed, run)["final"]["head"]
    assert list(other) == ["recall@1", "recall@17", "precision@1", "precision@17"]
    assert other["recall@1"] == results["final"]["head"]["recall@1"] < other["recall@17"]
    changed.eval.ks, changed.eval.metrics = (1, 9999), ("recall",)
    assert list(evaluate(changed, run)["final"]["head"]) == ["recall@1"]
    changed.eval.metrics = ("recall", "precision")
    with pytest.raises(UserError, match="eval.ks holds 9999"):
        evaluate(changed, run)


def test_an_interrupted_run_ends_as_an_undisturbed_one(run, tmp_path):
    """Every number that it logs and saves, bit for bit, although a checkpoint precedes its end."""
    train.train_and_evaluate(saved_config(run), tmp_path)
    assert_same_run(tmp_path, run, least=40)
    assert step_metrics(tmp_path) == step_metrics(run)


def test_a_run_finds_its_images_where_they_have_moved_and_refuses_others(tmp_path, capsys):
    old, new, other = (tmp_path / f"{name}.npz" for name in ("old", "new", "other"))
    results = train.train_and_evaluate(features_config(small_runs.write_features(old)), tmp_path)
    old.rename(new)
    assert evaluate(features_config(new), tmp_path)["final"] == results["final"]
    run = f"--workdir={tmp_path}"
    commands.call("spectrum", run, f"--config.data.path={new}")
    with pytest.raises(UserError, match="takes no configuration: --config.seed=1"):
        commands.call("spectrum", run, "--config.seed=1")
    arrays = dict(np.load(new))
    np.savez(other, **(arrays | {"features": arrays["features"] + 1}))
    for action in (evaluate, train.train_and_evaluate):
        with pytest.raises(UserError, match="the images have changed since the run"):
            action(features_config(other), tmp_path)
    with pytest.raises(UserError, match="the images have changed since the run"):
        commands.call("spectrum", run, f"--config.data.path={other}")
    assert train.train_and_evaluate(features_config(new), tmp_path) == results
    assert saved_config(tmp_path).data.path == str(new)
    capsys.readouterr()
    (tmp_path / "results.json").unlink()
    new.rename(old)
    assert train.train_and_evaluate(features_config(old), tmp_path) == results
    assert "continuing after step 12" in capsys.readouterr().err


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_a_finished_run_is_trained_for_longer(tmp_path, capsys, schedule):
    path, fields = small_runs.write_features(tmp_path / "a.npz"), [f"optim.schedule={schedule}"]
    config = features_config(path, *fields)
    short = train.train_and_evaluate(config, tmp_path / "run")
    config.train.total_steps = 16
    capsys.readouterr()
    results = train.train_and_evaluate(config, tmp_path / "run")
    equal = schedule == "constant"
    outcome = "is that of a run of 16 steps" if equal else "so no single run equals it"
    assert "the run of 12 steps goes on to step 16; its" in (said := capsys.readouterr().err)
    assert outcome in said and read_object(tmp_path / "run/results-12.json") == short
    train.train_and_evaluate(config, tmp_path / "whole")
    whole, resumed = (saved_arrays(tmp_path / name) for name in ("whole", "run"))
    assert all(np.array_equal(whole[name], resumed[name]) for name in whole) == equal
    assert train.train_and_evaluate(config, tmp_path / "run") == results
    config.train.total_steps = 12
    with pytest.raises(UserError, match=r"train.total_steps: 16 -> 12"):
        train.train_and_evaluate(config, tmp_path / "run")
    config.train.total_steps = 20
    shutil.rmtree(tmp_path / "run/checkpoints")
    with pytest.raises(UserError, match=r"train.total_steps: 16 -> 20"):
        train.train_and_evaluate(config, tmp_path / "run")


def test_training_stops_if_validation_scores_do_not_improve(tmp_path, monkeypatch, capsys):
    recalls = iter([0.5, 0.75, 0.75, 0.25, 0.75])  # Of steps 0, 2, 4, 6 and 8.
    scores = lambda *_: {"head": {"recall@1": next(recalls)}}  # noqa: E731
    monkeypatch.setattr(Experiment, "validation_scores", scores)
    path = small_runs.write_features(tmp_path / "a.npz")
    fields = ["eval.every=2", "train.total_steps=30", "train.patience=3", "run.checkpoint_every=1"]
    with small_runs.interrupted_after(6):
        train.train_and_evaluate(features_config(path, *fields), tmp_path)
    for _ in range(2):
        results = train.train_and_evaluate(features_config(path, *fields), tmp_path)
        assert results["last_step"] == 8 == results["best_step"]
        assert results["tied_steps"] == [2, 4, 8]
        assert "last: step 8, where train.patience ended" in capsys.readouterr().out
        assert evaluate(features_config(path, *fields), tmp_path).keys() >= {"final"}
        with pytest.raises(UserError, match="ended this run at step 8; .* another patience"):
            longer = features_config(path, *fields, "train.total_steps=60")
            train.train_and_evaluate(longer, tmp_path)
        (tmp_path / "results.json").unlink()
    for field, sentence in (
        ("eval.every=0", "must be 0 unless eval.every is set"),
        ("data.validation_classes=0", "must be 0: no class is held out for validation: .* set"),
    ):
        with pytest.raises(UserError, match=sentence):
            train.train_and_evaluate(features_config(path, *fields, field), tmp_path / "other")


def test_the_same_command_writes_a_report_that_was_interrupted(tmp_path):
    config, reported = features_config(small_runs.write_features(tmp_path / "a.npz")), []

    def interrupted(run):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train.train_and_evaluate(config, tmp_path, report=interrupted)
    train.train_and_evaluate(config, tmp_path, report=lambda run: reported.append(run.name))
    assert reported == [tmp_path.name]
    (tmp_path / "report.html").write_text("")
    train.train_and_evaluate(config, tmp_path, report=interrupted)


@pytest.mark.slow
def test_an_unfinished_run_is_evaluated_at_its_last_state_under_its_step(photos_folder, tmp_path):
    config = small_runs.load(photos_folder, "train.total_steps=6")
    small_runs.save_untrained(config, tmp_path)  # Random weights of steps 3, its best, and 6.
    scores = evaluate(config, tmp_path)
    assert scores.keys() == {"step 6", "best"} and scores["step 6"] != scores["best"]
    (tmp_path / "results.json").write_text("{}")
    assert evaluate(config, tmp_path) == {"final": scores["step 6"], "best": scores["best"]}
    shutil.rmtree(tmp_path / "checkpoints/6")
    assert evaluate(config, tmp_path) == {"step 3": scores["best"], "best": scores["best"]}


def test_a_folder_of_another_run_is_refused(load_glyphs, tmp_path):
    with Workdir(tmp_path, flatten(load_glyphs())).locked({}):
        pass
    for action, field, sentence in (
        (train.train_and_evaluate, "seed=1", r"another configuration \(seed: 0 -> 1\)"),
        (train.train_and_evaluate, "train.total_steps=12", "load_head=True starts from this run"),
        (evaluate, "model.depth=2", r"another configuration \(model.depth: 1 -> 2\)"),
    ):
        with pytest.raises(UserError, match=sentence):
            action(load_glyphs(field), tmp_path)
    Workdir(tmp_path, flatten(load_glyphs("run.workers=1")))
    (tmp_path / "config.json").unlink()
    (tmp_path / "checkpoints/5").mkdir()
    with pytest.raises(UserError, match="holds a run without its config.json"):
        train.train_and_evaluate(load_glyphs(), tmp_path)
