"""The parts of a run's time."""

import jax

from hypjax.monitoring import stopwatch
from hypjax.monitoring.stopwatch import Stopwatch

COMPILING = "/jax/core/compile/backend_compile_duration"


def test_compiling_is_taken_out_of_the_part_it_happens_in(monkeypatch):
    now = 100.0

    def wait(seconds, compiling=None):
        """Moves the clock; JAX then reports `compiling` seconds of compilation."""
        nonlocal now
        now += seconds
        if compiling:
            jax.monitoring.record_event_duration_secs(COMPILING, compiling)

    monkeypatch.setattr(stopwatch.time, "monotonic", lambda: now)
    watch = Stopwatch()
    watch.turn_to("steps")
    wait(1)
    wait(2, compiling=2)
    wait(3)
    wait(4, compiling=4)  # Two programs that are traced within
    wait(5, compiling=5)
    wait(6, compiling=15)  # a third, of 4 + 5 + 6 seconds.
    with watch.part("evaluation"):
        wait(7, compiling=7)
        wait(8)
    parts = {name: seconds for name, seconds in watch.seconds().items() if seconds}
    assert parts == {"compile": 2 + 15 + 7, "steps": 1 + 3, "evaluation": 8, "total": 36}
