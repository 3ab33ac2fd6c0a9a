"""Timing and tables of all suites: each task is timed in turn with another library, the peer.

A suite is a module of this package: `rows(options)` measures, and `COLUMNS` formats the table. It
may also have `conclude(rows, output)`. Peers that are not installed are skipped.
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

_MIN_SECONDS = 0.1  # Of a measurement; faster calls are repeated in one measurement.
_LONG = 1  # Seconds from which a call needs no untimed call before it to fill the caches.
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
    """The name of the suite, and the flags of the command."""

    suite: str = ""
    quick: bool = False
    repeats: int = 3
    images: str | None = None
    target: str | None = None
    devices: int = 0
    hlo: str | None = None
    cache: str = "host"
    recipe: str = ""
    overrides: Sequence[str] = ()


class Task(NamedTuple):
    """A task to time with hypjax, and optionally with another library."""

    name: str
    ours: Call  # Performs the task and waits for the result.
    peer: Call | None = None  # None if there is no peer, or it is not installed.
    peer_name: str = ""  # Name of the peer, or what to install.
    items: int | None = None  # Number of items processed, for a rate.
    memory: int | None = None  # Bytes that our program needs, if it is a single program.


def measure(tasks: Iterable[Task], options: Options) -> Iterator[dict[str, Any]]:
    """Times hypjax and the peer in turn, and yields a row for each task.

    A row holds the seconds of each repeat in `ours` and `peer`, and their medians.

    Raises:
        Interrupted: An interrupt arrived; raised after the current call.
    """
    with exits.deferred("interrupted: finishing this measurement") as interrupted:

        def unless_interrupted(run: Call) -> None:
            if interrupted():
                raise Interrupted("the remaining tasks were not measured", interrupted())
            run()

        for task in tasks:
            console.say(task.name)
            calls = [task.ours, task.peer] if task.peer else [task.ours]
            calls = [functools.partial(unless_interrupted, call) for call in calls]
            times = interleaved(calls, 1 if options.quick else options.repeats)
            ours, peer = times[0], times[1] if task.peer else []
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

    A first round compiles programs, and a second round tells how often to repeat a fast call within
    a measurement. An untimed call precedes each measurement of a call under a second, since other
    calls have filled the caches meanwhile; training, too, calls the same program repeatedly.
    """
    for run in calls:
        run()
    estimates = [seconds(run) for run in calls]
    times = [[estimate] if estimate > _LONG else [] for estimate in estimates]
    rng = np.random.default_rng(0)
    for _ in range(repeats):
        for i in rng.permutation(len(calls)):
            if estimates[i] <= _LONG:
                calls[i]()
            if len(times[i]) < repeats:
                times[i].append(seconds(calls[i], math.ceil(_MIN_SECONDS / estimates[i])))
    return times


def seconds(run: Call, count: int = 1) -> float:
    """Mean seconds of `count` calls."""
    started = time.perf_counter()
    for _ in range(count):
        run()
    return (time.perf_counter() - started) / count


class _Cells(string.Formatter):
    """Formats a missing number as a dash."""

    def format_field(self, value: Any, spec: str) -> str:
        return "–" if value is None else super().format_field(value, spec)


def table(columns: Mapping[str, str], rows: Rows) -> str:
    """Formats a Markdown table, without columns that have no value.

    `columns` holds, by title, format strings for the fields of a row.
    """
    filled_columns = []
    for title, template in columns.items():
        cells = [_Cells().vformat(template, (), row) for row in rows]
        if any(cell[:1] not in "–" for cell in cells):
            filled_columns.append((title, "---", *cells))
    return "\n".join(f"| {' | '.join(line)} |" for line in zip(*filled_columns, strict=True))
