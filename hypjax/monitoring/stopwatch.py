"""Splits a run's time, from the first import to results, into parts for times.json."""

import contextlib
import functools
import threading
import time
from collections.abc import Iterator

LAUNCHED = time.monotonic()  # `hypjax.main` imports this module before others that take time.

# Parts of a run's time, which do not overlap, in the order of their beginnings.
PARTS = (
    "import",  # Python, packages, starting JAX; with several processes, until all have joined.
    "prepare",  # Opening images, caches and weights; initial state.
    "compile",  # Tracing, lowering, and compiling or reading from the compilation cache.
    "input",  # Steps that wait for their batches.
    "steps",  # The rest of the loop.
    "mining",  # Embedding images and choosing the tuples of an epoch.
    "evaluation",
    "saving",  # While the loop waits; the rest of saving overlaps with the steps.
    "other",
)

_COMPILING = "/jax/core/compile/"  # Prefix of JAX's compilation events.
_threads = threading.local()  # Each thread's latest stopwatch: JAX reports events in its thread.


class Stopwatch:
    """Splits a run's time into `PARTS`, for the thread that creates the stopwatch.

    The first part is "import", which begins at `launched`, a value of `time.monotonic`, or now. The
    time of a nested part, or of compilation, does not count in the part around it. The device's
    time counts where the loop waits for the device: in "steps", or in "input", which is therefore
    an upper bound of the time that faster input could save.
    """

    def __init__(self, launched: float | None = None) -> None:
        self._seconds = dict.fromkeys(PARTS, 0.0)
        self._compiled: list[tuple[float, float]] = []  # End and length of the outermost events.
        self._part = "import"
        self._start = time.monotonic() if launched is None else launched
        self._part_start = self._start
        _threads.stopwatch = self
        _listen()

    def turn_to(self, part: str) -> str:
        """Counts the time from now on as the given part, and returns the previous part."""
        now, previous_part = time.monotonic(), self._part
        self._seconds[previous_part] += now - self._part_start
        self._part, self._part_start = part, now
        return previous_part

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Counts the time of the body as a part, whose name profiler traces show."""
        import jax

        previous_part = self.turn_to(name)
        try:
            with jax.profiler.TraceAnnotation(name):
                yield
        finally:
            self.turn_to(previous_part)

    def seconds(self) -> dict[str, float]:
        """Seconds of each part so far, and their sum as "total"."""
        self.turn_to(self._part)
        return {**self._seconds, "total": self._part_start - self._start}

    def describe(self) -> str:
        """Returns one line: '58 s in all: 6 import, 14 compile, 38 steps'."""
        seconds = self.seconds()
        digits = 0 if seconds["total"] >= 10 else 1
        rounded = {name: f"{value:.{digits}f}" for name, value in seconds.items()}
        total = rounded.pop("total")
        parts = ", ".join(f"{value} {name}" for name, value in rounded.items() if float(value))
        return f"{total} s in all: {parts}"

    def _count_compiling(self, seconds: float) -> None:
        """Moves the time of an event that ends now from the current part to "compile"."""
        now, uncounted_seconds = time.monotonic(), seconds
        # Functions that a program calls are traced within the program's event, and reported first.
        while self._compiled and self._compiled[-1][0] > now - seconds:
            _, inner_seconds = self._compiled.pop()
            uncounted_seconds -= inner_seconds
        self._compiled.append((now, seconds))
        self._seconds[self._part] -= uncounted_seconds
        self._seconds["compile"] += uncounted_seconds


@functools.cache
def _listen() -> None:
    """Registers a listener for JAX's compilation events, once: not every JAX can remove it."""
    from jax import monitoring

    def on_duration(event: str, duration_secs: float, **_: object) -> None:
        if event.startswith(_COMPILING) and hasattr(_threads, "stopwatch"):
            _threads.stopwatch._count_compiling(duration_secs)

    monitoring.register_event_duration_secs_listener(on_duration)
