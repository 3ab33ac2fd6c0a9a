"""The comparison of this device with a CPU, here of CPUs."""

import json

import pytest

from tests.helpers import commands


@pytest.mark.slow
def test_a_cpu_agrees_with_itself(tmp_path):
    output = tmp_path / "parity.json"
    commands.call("benchmarks", "parity", "--quick", f"--output={output}")
    rows = json.loads(output.read_text())["parity"]
    assert len(rows) == 8 and all(row["passed"] for row in rows)
    assert [row["error"] == 0 for row in rows[-2:]] == [True, True]  # Of recalls.
    assert all(row["error"] > 1e-6 for row in rows[:2])  # In bfloat16.
