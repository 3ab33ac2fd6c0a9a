"""What suites share: tasks that are timed in turn with other libraries, and tables.

A suite is a module of this package, with `rows(options)`, which measures, and `COLUMNS` of its
table. It may also `conclude(rows, output)`. Peers are skipped where they are not installed.
"""

import functools
import math
import statistics
import string
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from hypjax.errors import Interrupted
from hypjax.system import console, exits

_MIN_SECONDS = 0.1  # Of a measurement; faster calls are repeated within it.
_LONG = 1  # Seconds of a call for which it does not matter that caches fill in its beginning.
Rows = list[dict[str, Any]]
Call = Callable[[], Any]

# Columns of the timed suites.
COLUMNS = {
    "task": "{name}",
    "seconds": "{seconds:.3g} ({fastest:.3g}–{slowest:.3g})",
    "items/s": "{rate:,.1f}",
    "peer": "{peer_name}",
    "peer's seconds": "{peer_seconds:.3g}",
    "ratio": "{ratio:.2f}",
    "our memory": "{memory_mib:.0f} MiB",
}


class Options(NamedTuple):
    """The suite and the flags of the command."""

    suite: str = ""
    quick: bool = False
    repeats: int = 3
    images: str | None = None
    target: str | None = None
    devices: int = 0
    hlo: str | None = None
    cache: str = "host"
    overrides: Sequence[str] = ()


class Task(NamedTuple):
    """Something to time, and perhaps the same with another library."""

    name: str
    ours: Call  # Performs the task and waits for the result.
    peer: Call | None = None  # None also where the library is not installed.
    peer_name: str = ""  # Or what to install.
    items: int | None = None  # Number of items processed, for a rate.
    memory: int | None = None  # Bytes that our program needs, if it is a single one.


def measure(tasks: Iterable[Task], options: Options) -> Iterator[dict[str, Any]]:
    """Times our implementation of each task and the other one in turn, and yields its row.

    A row holds the seconds of each repeat in `ours` and `peer`, and their medians.

    Raises:
        Interrupted: An interrupt arrived; raised after the call during which it did.
    """
    with exits.deferred("interrupted: finishing this measurement") as interrupted:

        def unless_interrupted(run: Call) -> None:
            if interrupted():
                raise Interrupted("the remaining tasks were not measured", interrupted())
            run()

        for task in tasks:
            console.say(task.name)
            calls = [functools.partial(unless_interrupted, f) for f in (task.ours, task.peer) if f]
            ours, *others = interleaved(calls, 1 if options.quick else options.repeats)
            peer = others[0] if others else []
            seconds = statistics.median(ours)
            peer_seconds = statistics.median(peer) if peer else None
            yield {
                "name": task.name,
                "seconds": seconds,
                "fastest": min(ours),
                "slowest": max(ours),
                "rate": task.items and task.items / seconds,
                "peer_name": task.peer_name,
                "peer_seconds": peer_seconds,
                "ratio": peer_seconds and peer_seconds / seconds,
                "memory_mib": task.memory and task.memory / 2**20,
                "ours": ours,
                "peer": peer,
            }


def interleaved(calls: Sequence[Call], repeats: int) -> list[list[float]]:
    """Seconds of calls in rounds, so that a change in the machine's speed affects all alike.

    A first round compiles programs, and a second one says how often to repeat a fast call within a
    measurement. Each measurement of a call under a second follows an untimed one: the other calls
    have meanwhile filled the caches. Training calls the same program repeatedly, too.
    """
    for run in calls:
        run()
    second = [seconds(run) for run in calls]
    times = [[taken] if taken > _LONG else [] for taken in second]
    rng = np.random.default_rng(0)
    for _ in range(repeats):
        for i in rng.permutation(len(calls)):
            if second[i] <= _LONG:
                calls[i]()
            if len(times[i]) < repeats:
                times[i].append(seconds(calls[i], math.ceil(_MIN_SECONDS / second[i])))
    return times


def seconds(run: Call, count: int = 1) -> float:
    """Mean seconds of some calls."""
    started = time.perf_counter()
    for _ in range(count):
        run()
    return (time.perf_counter() - started) / count


class _Cells(string.Formatter):
    """Formats a missing number as a dash."""

    def format_field(self, value: Any, spec: str) -> str:
        return "–" if value is None else super().format_field(value, spec)


def table(columns: Mapping[str, str], rows: Rows) -> str:
    """Formats a Markdown table: titles, and format strings for the fields of a row.

    Columns without any value are left out.
    """
    cells = {
        title: [_Cells().vformat(form, (), row) for row in rows] for title, form in columns.items()
    }
    shown = [
        (title, "---", *own) for title, own in cells.items() if any(c[:1] not in "–" for c in own)
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in zip(*shown, strict=True))
