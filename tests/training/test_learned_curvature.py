"""Runs that learn the curvature of their space."""

import json
import re

import numpy as np
import pytest

import hypjax
from hypjax.analysis.run_embeddings import open_runs, scored_head
from hypjax.analysis.run_hits import search_test_images
from hypjax.config import load_config
from hypjax.data.parts import Task
from hypjax.errors import UserError
from hypjax.evaluate import evaluate
from hypjax.geometry import PoincareBall
from hypjax.geometry.learned import scalar_parameters, scalar_values
from hypjax.inference.weights import restore_models
from hypjax.monitoring.stopwatch import Stopwatch
from hypjax.objectives import create_objective
from hypjax.retrieval.embeddings import Embeddings
from hypjax.runs.workdir import saved_config
from hypjax.training import train
from hypjax.training.setup import build
from hypjax.training.states import random_state
from tests.helpers import commands, small_runs
from tests.helpers.steps import random_batch, start
from tests.training.test_interruptions import assert_same_run

CONFIG = str(small_runs.REPOSITORY / "configs/features.py:hyp")
FIELDS = [*small_runs.SHORT_FEATURES, "model.head_dim=4"]
FIELDS += ["optim.learning_rate=1e-3", "optim.schedule=constant"]
LEARNED = ["objective.learn_c=True", "objective.c_rate=50"]


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """Features of overlapping classes."""
    rng, labels = np.random.default_rng(0), np.repeat(np.arange(12), 4)
    features = rng.normal(size=(12, 16))[labels] + rng.normal(size=(48, 16))
    path = tmp_path_factory.mktemp("features") / "features.npz"
    np.savez(path, features=features.astype(np.float32), labels=labels)
    return path


def load(path, *overrides):
    return load_config(CONFIG, [*FIELDS, f"data.path={path}", *LEARNED, *overrides])


@pytest.fixture(scope="module")
def run(file):
    folder = file.parent / "run"
    train.train_and_evaluate(load(file), folder)
    return folder


def results_of(run):
    return json.loads((run / "results.json").read_text())


def restored(run):
    """The parameters of a run's last model and of its best one, by these names."""
    models = restore_models(run, saved_config(run))
    return {name: model.params for name, model in models.items()}


def test_the_curvature_of_each_state_is_reported(run, capsys):
    learned, model = results_of(run)["learned"], restored(run)
    results = {state: numbers["c"] for state, numbers in learned.items()}
    assert results["untrained"] == pytest.approx(0.1, rel=1e-6) and results.keys() >= {"best"}
    assert abs(np.log(results["final"] / 0.1)) > 0.1
    for state, params in model.items():
        assert scalar_values(params["scalars"])["c"] == results[state]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    logged = {line["step"]: line["c"] for line in lines if "c" in line}
    assert list(logged) == [0, 2, 3, 4, 6, 8, 9, 10, 12]
    # That of a step is the one before its update.
    assert logged[0] == pytest.approx(0.1, rel=1e-6) and 0.1 != logged[12] != results["final"]
    found = evaluate(saved_config(run), run)["learned"]
    assert found == {state: learned[state] for state in ("final", "best")}
    assert f"learned: c = {results['final']:.4g} final" in capsys.readouterr().out


@pytest.mark.slow
def test_a_resumed_run_ends_as_if_it_had_not_been_interrupted(run, file, tmp_path):
    with small_runs.interrupted_after(6):
        train.train_and_evaluate(load(file), tmp_path / "again")
    train.train_and_evaluate(load(file), tmp_path / "again")
    assert_same_run(tmp_path / "again", run, least=10)


def test_what_is_made_of_a_run_has_its_curvature(file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run, features = tmp_path / "run", np.load(file)["features"]
    params = small_runs.save_untrained(load(file), run)["model"]
    c, head = scalar_values(params["scalars"])["c"], params["head"]
    assert abs(c - 0.1) > 0.01
    model = hypjax.load(run)
    assert model.space == PoincareBall(c, 2.3) and f"c = {c}" in str(model)
    points = model.space.embed(features @ head["kernel"] + head["bias"])
    np.testing.assert_allclose(model.embed(features), points, atol=2e-6)

    commands.call("embed", f"--workdir={run}", f"--images={file}", "--output=g.npz")
    gallery = Embeddings.load("g.npz")
    assert gallery.space == model.space and gallery.fingerprint == model.fingerprint
    (hits,) = model.search("g.npz", features[3:4], k=2)
    expected = np.sort(model.space.distance(points[3], points))[1]
    assert hits.distances[1] == pytest.approx(expected, rel=1e-4)

    (opened,) = open_runs([run])
    assert scored_head(opened).space == search_test_images(opened, 2).space == model.space
    objective = create_objective(opened.config).with_scalars(scalar_values(params["scalars"]))
    assert objective.space == model.space


def test_a_published_model_has_its_curvature(photos_folder, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    folder = tmp_path / "published"
    params = small_runs.save_untrained(small_runs.load(photos_folder, *LEARNED), tmp_path / "run")
    hypjax.push(tmp_path / "run", "me/model", folder=folder)
    published, model = hypjax.load(folder), hypjax.load(tmp_path / "run")
    assert published.space.c == model.space.c == scalar_values(params["model"]["scalars"])["c"]
    assert published.fingerprint == model.fingerprint
    text = (folder / "hypjax.json").read_text()
    (folder / "hypjax.json").write_text(re.sub('"log_c": [^}]*', '"log_c": 1e9', text))
    with pytest.raises(UserError, match="hypjax.json is damaged .learned holds no valid log_c"):
        hypjax.load(folder)


def test_evaluations_of_several_curvatures_share_their_programs(file):
    built = build(load(file, "eval.spaces.encoder=sphere,poincare", "eval.metrics=recall,map@r"))
    model = random_state(built.learner, built.spec).params["model"]
    found = []
    for i, c in enumerate((0.1, 0.01, 5.0)):
        stopwatch = Stopwatch()
        model = {**model, "scalars": scalar_parameters({"c": c})}
        found.append(built.scores(model, Task(built.splits.test)))
        assert bool(sum(stopwatch.programs.values())) == (i == 0)
    assert found[0]["head"] != found[2]["head"]  # What is shown is that of the curvature.
    assert found[0]["encoder"] == found[2]["encoder"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hypmix", "hier+proxy_anchor", "cones+supcon"])
def test_other_losses_train_it_and_averages_follow(name, load_glyphs):
    fields = ["objective.hier_neighbors=4", "objective.hier_proxies=8"] * name.startswith("hier")
    fields += [f"objective.name={name}", "train.ema_decay=0.9", "optim.warmup_steps=0"]
    config = load_glyphs(*LEARNED, *fields)
    state, step = start(config, microbatch=12)  # In slices, too, there is one parameter.
    found = []
    for i in range(3):
        state, metrics = step(state, random_batch(i))
        found.append((float(metrics["c"]), scalar_values(state.average["scalars"])["c"]))
    assert step._cache_size() == 1 and np.isfinite(metrics["loss"])
    trained = [c for c, _ in found[1:]] + [scalar_values(state.params["model"]["scalars"])["c"]]
    assert found[0][0] == pytest.approx(0.1, rel=1e-6) and len({0.1, *trained}) == 4
    # The first average is the model itself; later ones lie between the one before and the model.
    assert found[0][1] == pytest.approx(trained[0], rel=1e-6)
    low, high = sorted([found[0][1], trained[1]])
    assert low < found[1][1] < high


@pytest.mark.slow
def test_a_frozen_curvature_stays_and_a_trained_one_keeps_its_bounds(file, tmp_path, capsys):
    def last(name, *overrides):
        return train.train_and_evaluate(load(file, *overrides), tmp_path / name)["learned"][
            "final"
        ]["c"]

    frozen = last("frozen", "optim.frozen=encoder,space", "objective.c=0.3")
    assert frozen == pytest.approx(0.3, rel=1e-6)
    assert "space stays random" not in capsys.readouterr().err
    bounds = "objective.c_bounds=0.09,0.11", "objective.c_rate=1e4"
    assert last("bound", *bounds) in (pytest.approx(0.09), pytest.approx(0.11))


@pytest.mark.slow
def test_a_head_that_is_loaded_brings_its_curvature(run, file, tmp_path, capsys):
    c = results_of(run)["learned"]["best"]["c"]
    loaded = [f"model.weights={run}", "model.load_head=True", "model.head_init=orthogonal"]
    again = train.train_and_evaluate(load(file, *loaded), tmp_path / "learned")
    assert again["learned"]["untrained"]["c"] == c
    train.train_and_evaluate(load(file, *loaded, "objective.learn_c=False"), tmp_path / "fixed")
    assert "has learned c = " in capsys.readouterr().err


def test_settings_that_exclude_a_learned_curvature_are_refused(file):
    for overrides, message in [
        (["objective.space=sphere"], "learn_c is True"),
        (["objective.c=0"], "objective.c is 0.0"),
        (["objective.c_bounds=0,1"], "c_bounds is .*ascending"),
        (["objective.learn=margin"], "learn is .*any of temperature"),
        (["objective.curvatures=0.1,20"], "curvatures is .*within"),
        (["objective.curvatures=0.1,1", "objective.name=hypmix"], "for hypmix"),
    ]:
        with pytest.raises(UserError, match=message):
            load(file, *overrides)


def test_further_numbers_are_learned_and_used_by_whatever_is_made_of_the_run(file, tmp_path):
    fields = ["objective.name=hypmix", "objective.learn=ball_weight,sphere_temperature"]
    config = load(file, *fields, "optim.learning_rate=0.05", "train.total_steps=3")
    results = train.train_and_evaluate(config, tmp_path / "run")["learned"]
    assert results["untrained"] == pytest.approx(
        {"c": 0.1, "ball_weight": 3.0, "sphere_temperature": 0.05}
    )
    final = results["final"]
    assert all(
        abs(np.log(final[name] / first)) > 0.01 for name, first in results["untrained"].items()
    )
    model = restored(tmp_path / "run")["final"]
    objective = create_objective(saved_config(tmp_path / "run"))
    space = objective.with_scalars(scalar_values(model["scalars"])).score_space
    ball = PoincareBall(final["c"], 2.3)
    assert space.parts[0][1] == pytest.approx(1 / (2 * final["sphere_temperature"]))
    assert space.parts[1] == (ball, final["ball_weight"] / 0.2)


@pytest.mark.slow
def test_several_curvatures_are_learned_each(file, tmp_path):
    curvatures = "objective.curvatures=0.05,0.5,2"
    results = train.train_and_evaluate(load(file, curvatures), tmp_path / "run")
    learned = {state: [*numbers.values()] for state, numbers in results["learned"].items()}
    assert [*results["learned"]["best"]] == ["curvatures_0", "curvatures_1", "curvatures_2"]
    assert learned["untrained"] == pytest.approx((0.05, 0.5, 2))
    changes = np.log(learned["final"]) - np.log(learned["untrained"])
    assert len({round(change, 3) for change in changes}) == 3
    model = hypjax.load(tmp_path / "run")
    assert [ball.c for ball, _ in model.space.parts] == pytest.approx(learned["best"])
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert {"curvatures_0", "curvatures_2"} <= lines[0].keys() | lines[1].keys()
