"""Suites without other libraries: whole runs, parity with a CPU, and the timed ones."""

import json
import signal

import pytest

from benchmarks import measure
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


@pytest.mark.slow
def test_a_cpu_agrees_with_itself(tmp_path):
    output = tmp_path / "parity.json"
    commands.call("benchmarks", "parity", "--quick", f"--output={output}")
    rows = json.loads(output.read_text())["parity"]
    assert len(rows) == 6 and all(row["passed"] for row in rows)
    assert [row["error"] for row in rows[-2:]] == [0, 0]  # Of recalls.
    assert all(row["error"] > 1e-6 for row in rows[:2])  # In bfloat16.
