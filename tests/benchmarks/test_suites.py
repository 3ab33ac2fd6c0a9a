"""Suites without other libraries: whole runs, parity with a CPU, and the timed ones."""

import json
import signal

import pytest

from benchmarks import finetune, measure
from benchmarks.splats import splats
from hypjax.config import flatten, load_config
from hypjax.errors import Interrupted
from tests.helpers import commands


def test_an_interrupt_keeps_the_rows_before_it():
    tasks = [
        measure.Task("a", lambda: None),
        measure.Task("b", lambda: signal.raise_signal(signal.SIGTERM)),
        measure.Task("c", lambda: None),
    ]
    rows = []
    with pytest.raises(Interrupted) as ended:
        rows.extend(measure.measure(tasks, measure.Options(quick=True)))
    assert [row["name"] for row in rows] == ["a"] and ended.value.status == 75


def test_calls_that_splat_what_their_function_writes_out_are_found(tmp_path):
    (tmp_path / "a.py").write_text(
        "def f(given, **more):\n"
        "    options = {'x': 1} | given\n"
        "    named = {name: 1 for name in given}\n"
        "    pair: tuple = (1, 2)\n"
        "    g(**options, **more)\n"
        "    g(*pair, *given, [*pair], **named)\n"
    )
    assert sorted(splats(tmp_path / "a.py")) == [False, False, True]


@pytest.mark.by_hand
def test_the_spine_is_counted(tmp_path):
    output = tmp_path / "spine.json"
    commands.call("benchmarks", "spine", f"--output={output}")
    rows = json.loads(output.read_text())["spine"]
    assert len(rows) == 9 and all(row["value"] > 0 for row in rows[:1] + rows[3:7])


@pytest.mark.slow
def test_a_cpu_agrees_with_itself(tmp_path):
    output = tmp_path / "parity.json"
    commands.call("benchmarks", "parity", "--quick", f"--output={output}")
    rows = json.loads(output.read_text())["parity"]
    assert len(rows) == 6 and all(row["passed"] for row in rows)
    assert [row["error"] for row in rows[-2:]] == [0, 0]  # Of recalls.
    assert all(row["error"] > 1e-6 for row in rows[:2])  # In bfloat16.


def test_losses_fine_tune_an_encoder_with_equal_budgets():
    """Proxies learn as fast as in the recipes of heads."""
    losses = ("hyp", "sph", "mix", "pa", "hier")
    configs = {loss: flatten(finetune.configured("grocery:hyp-lite", loss, [])) for loss in losses}
    for fields in configs.values():
        changed = {name for name in fields if fields[name] != configs["hyp"].get(name)}
        assert all(name.startswith("objective.") for name in changed)
    for loss, field in (("pa", "objective.proxy_rate"), ("hier", "objective.hier_rate")):
        trained = configs[loss], flatten(load_config(f"grocery:{loss}-lite,frozen"))
        rate, usual_rate = (x[field] * x["optim.learning_rate"] for x in trained)
        assert rate == pytest.approx(usual_rate)
