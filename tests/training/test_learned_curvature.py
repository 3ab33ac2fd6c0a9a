"""Runs that learn the curvature of their space."""

import json

import numpy as np
import pytest

import hypjax
from hypjax import train
from hypjax.analysis.run_embeddings import open_runs, scored_head
from hypjax.analysis.run_hits import search_test_images
from hypjax.assemble import assemble_method, assemble_training, saved_method
from hypjax.config import load_config
from hypjax.errors import UserError
from hypjax.evaluate import evaluate
from hypjax.experiment.trained import restore
from hypjax.galleries.embeddings import Embeddings
from hypjax.geometry import PoincareBall
from hypjax.geometry.learned import scalar_values
from hypjax.inference.pretrained import starting_parameters
from hypjax.runs.workdir import saved_config
from hypjax.training.states import first_state
from tests.helpers import commands, small_runs
from tests.helpers.losses import objective_of

CONFIG = str(small_runs.REPOSITORY / "configs/features.py:hyp")
FIELDS = [*small_runs.SHORT_FEATURES, "model.head_dim=4"]
FIELDS += ["optim.learning_rate=1e-3", "optim.schedule=constant"]
LEARNED = ["objective.learn_c=True", "objective.c_rate=50"]


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return small_runs.write_features(tmp_path_factory.mktemp("features") / "features.npz")


def load(path, *overrides):
    return load_config(CONFIG, [*FIELDS, f"data.path={path}", *LEARNED, *overrides])


@pytest.mark.slow
def test_the_curvature_of_each_state_is_reported(file, tmp_path, capsys):
    train.train_and_evaluate(load(file), run := tmp_path / "run")
    learned = json.loads((run / "results.json").read_text())["learned"]
    results = {state: numbers["c"] for state, numbers in learned.items()}
    assert results["untrained"] == pytest.approx(0.1, rel=1e-6) and results.keys() >= {"best"}
    assert abs(np.log(results["final"] / 0.1)) > 0.1
    for state, model in restore(run, saved_method(run)).items():
        assert scalar_values(model.params["scalars"])["c"] == results[state]
    actual = evaluate(saved_config(run), run)["learned"]
    assert actual == {state: learned[state] for state in ("final", "best")}
    assert f"learned: c = {results['final']:.4g} final" in capsys.readouterr().out


def test_a_head_that_is_loaded_brings_its_curvature(file, tmp_path, capsys):
    saved = small_runs.save_untrained(load(file), tmp_path)["model"]
    loaded = [f"model.weights={tmp_path}", "model.load_head=True", "model.head_init=orthogonal"]
    built = assemble_training(load(file, *loaded))
    pretrained = starting_parameters(built.experiment.method)
    model = first_state(built.learner, built.sizes, pretrained).params["model"]
    assert scalar_values(model["scalars"]) == scalar_values(saved["scalars"]) != {"c": 0.1}
    np.testing.assert_array_equal(model["head"]["kernel"], saved["head"]["kernel"])
    starting_parameters(assemble_method(load(file, *loaded, "objective.learn_c=False")))
    c = scalar_values(saved["scalars"])["c"]
    assert f"learned c = {c:g}; config.objective.c is 0.1" in capsys.readouterr().err


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
    with pytest.raises(UserError, match="embeds features of another model, not "):
        model.embed(np.zeros((9, 9, 3), np.uint8))

    commands.call("embed", f"--workdir={run}", f"--images={file}", "--output=g.npz")
    gallery = Embeddings.load("g.npz")
    assert gallery.space == model.space and gallery.fingerprint == model.fingerprint
    (hits,) = model.search("g.npz", features[3:4], k=2)
    expected = np.sort(model.space.distance(points[3], points))[1]
    assert hits.distances[1] == pytest.approx(expected, rel=1e-4)

    (opened,) = open_runs([run])
    assert scored_head(opened).space == search_test_images(opened, 2).space == model.space
    objective = opened.method.objective.with_scalars(scalar_values(params["scalars"]))
    assert objective.space == model.space


def test_further_numbers_are_used_by_whatever_is_made_of_the_run(file, tmp_path):
    fields = ["objective.name=hypmix", "objective.learn=ball_weight,sphere_temperature"]
    params = small_runs.save_untrained(load(file, *fields), tmp_path)["model"]
    learned = scalar_values(params["scalars"])
    objective = objective_of(saved_config(tmp_path)).with_scalars(learned)
    sphere, ball = objective.score_space.parts
    assert sphere[1] == pytest.approx(1 / (2 * learned["sphere_temperature"]))
    assert ball == (PoincareBall(learned["c"], 2.3), learned["ball_weight"] / 0.2)
