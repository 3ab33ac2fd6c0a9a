"""How tasks are timed, and how many operations the limits of the train benchmark count."""

import signal

import jax
import jax.numpy as jnp
import pytest

from benchmarks import measure, train
from benchmarks.programs import step_config
from hypjax.errors import Interrupted
from hypjax.models import create_embedder


def test_an_interrupt_keeps_the_rows_before_it():
    tasks = [
        measure.Task("a", lambda: None),
        measure.Task("b", lambda: signal.raise_signal(signal.SIGTERM)),
        measure.Task("c", lambda: None),
    ]
    rows = []
    with pytest.raises(Interrupted) as ended:
        rows.extend(measure.measure(tasks, repeats=1))
    assert [row["name"] for row in rows] == ["a"] and ended.value.status == 75
    assert "resume" not in str(ended.value)


def test_long_calls_are_timed_as_often_as_short_ones(monkeypatch):
    monkeypatch.setattr(measure, "_LONG", 0)
    calls = []
    [times] = measure.interleaved([lambda: calls.append(1)], 3)
    assert len(times) == 3


@pytest.mark.slow
@pytest.mark.parametrize("pooling", ["cls", "avg"])
def test_the_operations_are_those_that_xla_counts(pooling):
    config = step_config("vit", side=128, batch=4, samples=2)
    config.model.update(pooling=pooling, precision="float32", width=256, num_heads=2, depth=2)
    encoder = create_embedder(config).encoder
    images = jnp.zeros((4, 128, 128, 3))
    params = encoder.init(jax.random.key(0), images)
    found = jax.jit(encoder.apply).lower(params, images).compile().cost_analysis()["flops"]
    assert train.operations(config, encoder, training=False) == pytest.approx(found / 4, rel=0.05)
