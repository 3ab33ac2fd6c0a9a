"""Where the time of a run goes, from its launch to its results: times.json."""

import contextlib
import functools
import os
import pathlib
import threading
import time
from collections.abc import Iterator

_IMPORTED = time.monotonic()

# What a run's time is spent on, in the order of their beginning; no second is in two of them.
PARTS = (
    "import",  # Python, packages, JAX's start; of several processes, until they have met.
    "prepare",  # Opening images, caches, weights and the state.
    "compile",  # Tracing, lowering, and compiling or reading what was compiled before.
    "input",  # Steps that wait for their batches.
    "steps",  # All else of the loop.
    "evaluation",
    "saving",  # What the loop and the end wait for; the rest is done beside the steps.
    "other",
)
TIMES = "times.json"

_COMPILING = "/jax/core/compile/"  # What all events begin with that last while JAX compiles.
_MISS, _HIT = (f"/jax/compilation_cache/cache_{end}" for end in ("misses", "hits"))
_own = threading.local()  # Each thread's latest stopwatch: JAX tells of events where they happen.


class Stopwatch:
    """Splits the time of a run into `PARTS`; for the thread that makes it.

    A part within a part is only counted as itself, and so is compiling, wherever it happens. A
    step is computed while the loop goes on, so that its device's time is found where the loop
    waits for it: in "steps", or in "input" where the next batch is later than the device is ready.
    "input" is thus an upper bound of what faster input could save, and no part needs to wait for
    the device on its own.
    """

    def __init__(self, launched: float | None = None) -> None:
        """Starts; the first part is "import".

        Args:
            launched: Moment of `time.monotonic` from which to count, see `launch`; None: now.
        """
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._programs = {"compiled": 0, "cached": 0}
        self._compiled: list[tuple[float, float]] = []  # End and length of the outermost events.
        self._part = "import"
        self._from_launch = launched is not None
        self._since = self._began = time.monotonic() if launched is None else launched
        _own.stopwatch = self
        _listen()

    def turn_to(self, part: str) -> str:
        """Counts the time from now on as another part, and returns which it was until now."""
        now, before = time.monotonic(), self._part
        self._seconds[before] += now - self._since
        self._part, self._since = part, now
        return before

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Counts the body as a part; a trace of the run shows it under its name."""
        import jax

        before = self.turn_to(name)
        try:
            with jax.profiler.TraceAnnotation(name):
                yield
        finally:
            self.turn_to(before)

    def seconds(self) -> dict[str, float]:
        """Seconds of each part so far, and "total", which is their sum."""
        self.turn_to(self._part)
        return {**self._seconds, "total": self._since - self._began}

    def programs(self) -> dict[str, int]:
        """How many programs were compiled and kept, and read from those kept before.

        Zeros where JAX keeps none.
        """
        return dict(self._programs)

    def describe(self) -> str:
        """One line: '58 s from launch: 6 import, 14 compile, 38 steps'."""
        seconds = self.seconds()
        total = seconds.pop("total")
        digits = 0 if total >= 10 else 1
        shown = {name: f"{value:.{digits}f}" for name, value in seconds.items()}
        told = ", ".join(f"{value} {name}" for name, value in shown.items() if float(value))
        return f"{total:.{digits}f} s {'from launch' if self._from_launch else 'in all'}: {told}"

    def _count_compiling(self, seconds: float) -> None:
        """Takes an event that ends now out of the part in which it happened.

        What a program calls is traced within the tracing of the program, and told of first.
        """
        now = time.monotonic()
        within = 0.0
        while self._compiled and self._compiled[-1][0] > now - seconds:
            within += self._compiled.pop()[1]
        self._compiled.append((now, seconds))
        self._seconds[self._part] -= seconds - within
        self._seconds["compile"] += seconds - within


def launch() -> float:
    """The moment of `time.monotonic` at which this process was launched.

    Where the system does not tell, the moment at which this module was imported, which commands
    do first.
    """
    try:
        stat = pathlib.Path("/proc/self/stat").read_text()
        ticks = int(stat.rpartition(")")[2].split()[19])  # Since the machine's own start.
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return _IMPORTED
    return min(time.monotonic() - age, _IMPORTED)


@functools.cache
def _listen() -> None:
    """Has JAX tell of what it compiles; once, since not every version can be told to stop."""
    from jax import monitoring

    def took(event: str, seconds: float, **_: object) -> None:
        stopwatch = getattr(_own, "stopwatch", None)
        if stopwatch is not None and event.startswith(_COMPILING):
            stopwatch._count_compiling(seconds)

    def happened(event: str, **_: object) -> None:
        stopwatch = getattr(_own, "stopwatch", None)
        if stopwatch is not None and event in (_MISS, _HIT):
            stopwatch._programs["cached" if event == _HIT else "compiled"] += 1

    monitoring.register_event_duration_secs_listener(took)
    monitoring.register_event_listener(happened)
