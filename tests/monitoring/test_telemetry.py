"""What a run measures: metrics.jsonl and TensorBoard."""

import json
import math

import jax.numpy as jnp
import pytest

from hypjax.monitoring.monitor import summarise


def test_metrics_are_in_a_file_and_in_tensorboard_with_no_step_twice(run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    measured = {line["step"]: line for line in lines if "loss" in line}
    assert list(measured) == [2, 3, 4, 6, 8, 9, 10, 12]
    for line in measured.values():
        assert {
            *("loss", "gradient_norm", "update_norm", "learning_rate", "embedding_norm"),
            *("feature_norm", "clipped_share", "logit_min", "logit_max", "batch_recall@1"),
            *("images_per_second", "input_wait", "host_memory_peak", "skipped"),
        } <= line.keys()
        assert line["host_memory_peak"] > 50e6 and line["logit_min"] < line["logit_max"] <= 0
    assert measured[2]["learning_rate"] == pytest.approx(5e-4 / 2)  # Of step 2 itself.
    assert [line["step"] for line in lines if "validation" in line] == [0, 4, 8, 12]
    events = EventAccumulator(str(run / "tensorboard")).Reload()
    shown = {x: [(e.step, e.value) for e in events.Scalars(x)] for x in events.scalars.Keys()}
    assert [step for step, _ in shown["train/loss"]] == list(measured)
    losses = {step: line["loss"] for step, line in measured.items()}
    assert dict(shown["train/loss"]) == pytest.approx(losses, rel=1e-6)
    assert [step for step, _ in shown["validation/head/recall@1"]] == [0, 4, 8, 12]
    assert [step for step, _ in shown["test/encoder/recall@2"]] == [0, 12]


def test_reports_summarise_finite_steps():
    steps = [
        {name: jnp.float32(x) for name in ("loss", "logit_min", "logit_max", "learning_rate")}
        | {"finite": x == x, "skipped": jnp.int32(1)}
        for x in (1.0, 2.0, math.nan, 4.0)
    ]
    extremes = {"logit_min": 1, "logit_max": 4, "learning_rate": 4, "skipped": 1}
    assert summarise(steps, {"learning_rate"}) == {"loss": pytest.approx(7 / 3), **extremes}
    assert summarise(steps[2:3], ()) == {"skipped": 1}
