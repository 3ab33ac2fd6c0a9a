"""Where time goes: parts, compiling within them, and the moment of launch."""

import jax
import pytest

from hypjax.monitoring import stopwatch
from hypjax.monitoring.stopwatch import Stopwatch

COMPILING = "/jax/core/compile/backend_compile_duration"


@pytest.fixture
def clock(monkeypatch):
    """A clock that only moves when it is told to; also JAX's events are told by hand."""

    class Clock:
        now = 100.0

        def compile(self, seconds):
            self.now += seconds
            self.compiled(seconds)

        def compiled(self, seconds):
            jax.monitoring.record_event_duration_secs(COMPILING, seconds)

    clock = Clock()
    monkeypatch.setattr(stopwatch.time, "monotonic", lambda: clock.now)
    return clock


def spent(watch):
    return {name: value for name, value in watch.seconds().items() if value}


def test_compiling_is_taken_out_of_the_part_it_happens_in(clock):
    watch = Stopwatch()
    watch.turn_to("steps")
    clock.now += 1
    clock.compile(2)  # A program alone;
    clock.now += 3
    clock.compile(4)  # one that is traced while
    clock.compile(5)  # (as is a second one)
    clock.now += 6
    clock.compiled(15)  # another is,
    with watch.part("evaluation"):
        clock.compile(7)  # and one in another part.
        clock.now += 8
    assert spent(watch) == {"compile": 2 + 15 + 7, "steps": 1 + 3, "evaluation": 8, "total": 36}
