"""What a run measures: metrics.jsonl, TensorBoard, Weights & Biases, traces."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hypjax import train
from hypjax.errors import UserError
from hypjax.geometry import PoincareBall, Sphere
from hypjax.monitoring.monitor import Trace, summarised
from hypjax.objectives import PairwiseCrossEntropy, loss_function
from hypjax.types import Batch, Outputs
from tests.helpers import small_runs


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def scalars(folder):
    """What TensorBoard shows: {name: [(step, value), ...]}."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    shown = EventAccumulator(str(folder / "tensorboard")).Reload()
    return {name: [(e.step, e.value) for e in shown.Scalars(name)] for name in shown.scalars.Keys()}


@pytest.fixture(scope="module")
def finished(photos_folder, tmp_path_factory):
    """A run that was interrupted after step 8 and then finished."""
    folder = tmp_path_factory.mktemp("run")
    config = small_runs.load(photos_folder)
    with small_runs.interrupted_after(8):
        train.train_and_evaluate(config, folder)
    train.train_and_evaluate(config, folder, profile=(8, 9))
    return folder


def test_metrics_tell_how_training_goes(finished):
    measured = [line for line in lines(finished) if "loss" in line]
    assert [line["step"] for line in measured] == [2, 3, 4, 6, 8, 9, 10, 12]
    for line in measured:
        assert {
            *("loss", "gradient_norm", "update_norm", "learning_rate", "embedding_norm"),
            *("feature_norm", "clipped_share", "logit_min", "logit_max", "batch_recall@1"),
            *("images_per_second", "input_wait", "host_memory_peak", "skipped"),
        } <= line.keys()
        assert line["host_memory_peak"] > 50e6 and line["logit_min"] < line["logit_max"] <= 0
    assert measured[0]["learning_rate"] == pytest.approx(5e-4 / 2)  # That of step 2 itself.
    assert [line["step"] for line in lines(finished) if "validation" in line] == [0, 4, 8, 12]


def test_tensorboard_shows_the_same_with_no_step_twice(finished):
    shown = scalars(finished)
    measured = {line["step"]: line["loss"] for line in lines(finished) if "loss" in line}
    assert [step for step, _ in shown["train/loss"]] == list(measured)
    assert dict(shown["train/loss"]) == pytest.approx(measured, rel=1e-6)
    assert [step for step, _ in shown["validation/head/recall@1"]] == [0, 4, 8, 12]
    assert [step for step, _ in shown["test/encoder/recall@2"]] == [0, 12]


def test_a_trace_names_parts_of_the_loop_and_of_the_step(finished):
    (trace,) = (finished / "profile").rglob("*.xplane.pb")
    content = trace.read_bytes()
    places = ("/pixels/", "/encoder/", "(loss)/", "/optimizer/")
    for name in ("step_num", "evaluation", *places):
        assert name.encode() in content, name


def test_a_trace_of_no_steps_is_refused(tmp_path):
    for steps in ((0, 3), (5, 4), (10, 13)):
        with pytest.raises(UserError, match="two ascending steps"):
            Trace(tmp_path / "run", steps, total=12)


def test_reports_summarise_finite_steps():
    steps = [
        {name: jnp.float32(x) for name in ("loss", "logit_min", "logit_max", "learning_rate")}
        | {"finite": x == x, "skipped": jnp.int32(1)}
        for x in (1.0, 2.0, math.nan, 4.0)
    ]
    values = summarised(steps, {"learning_rate"})
    assert values == {
        "loss": pytest.approx(7 / 3),
        "logit_min": 1,
        "logit_max": 4,
        "learning_rate": 4,
        "skipped": 1,
    }
    assert summarised(steps[2:3], ()) == {"skipped": 1}


@pytest.mark.parametrize("space", [PoincareBall(0.5, 1.5), Sphere()])
def test_the_objective_tells_norms_logits_and_nearest_neighbours(space):
    rng = np.random.default_rng(0)
    classes, samples, dim = 7, 3, 5
    features = rng.normal(size=(classes * samples, dim)).astype(np.float32)
    labels = np.repeat(np.arange(classes), samples)
    batch = Batch(None, labels, None, None)
    loss = loss_function(PairwiseCrossEntropy(space, 0.2, samples))
    _, (_, told) = jax.jit(
        lambda projected: loss({}, {}, Outputs(None, projected), None, batch, None)
    )(features)
    points = np.asarray(space.embed(features))
    distances = np.asarray(space.distance(points[:, None], points[None]))
    others = ~np.eye(len(labels), dtype=bool)
    nearest = np.argmin(np.where(others, distances, np.inf), axis=1)
    norms = np.linalg.norm(features, axis=1)
    clipped = 0 if space == Sphere() else np.mean(norms > 1.5)
    wanted = {
        "feature_norm": norms.mean(),
        "embedding_norm": np.linalg.norm(points, axis=1).mean(),
        "clipped_share": clipped,
        "logit_min": -distances[others].max() / 0.2,
        "logit_max": -distances[others].min() / 0.2,
        "batch_recall@1": np.mean(labels[nearest] == labels),
        "chance_loss": samples * (samples - 1) * np.log(2 * classes - 1),
    }
    assert told.keys() == wanted.keys() and 0 < wanted["batch_recall@1"] < 1
    for name, value in wanted.items():
        np.testing.assert_allclose(told[name], value, rtol=2e-4, err_msg=name)
