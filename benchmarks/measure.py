"""What suites share: tasks that are timed in turn with other libraries, and tables.

A suite is a module of this package. A timed one has `tasks(options)`, which `measure` and `table`
turn into results. The others have `rows(options)`, which measures, and `table(rows)`. Peers are
skipped where they are not installed.
"""

import contextlib
import functools
import math
import os
import pathlib
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hypjax.errors import Interrupted
from hypjax.system import console, exits, machine

_SAMPLING_INTERVAL = 0.01  # Seconds between samples of the memory.
_MIN_SECONDS = 0.1  # Of a measurement; faster calls are repeated within it.
_LONG = 1  # Seconds of a call for which it does not matter that caches fill in its beginning.
Rows = list[dict[str, Any]]
Call = Callable[[], Any]


class Options(NamedTuple):
    """Flags of the command."""

    quick: bool = False
    repeats: int = 3
    images: str | None = None
    target: str | None = None
    devices: int = 0
    hlo: str | None = None
    cache: str = "host"
    points: int | None = None
    exported: bool = False
    overrides: Sequence[str] = ()


class Task(NamedTuple):
    """Something to time, and perhaps the same with another library."""

    name: str
    ours: Call  # Performs the task and waits for the result.
    peer: Call | None = None  # None also where the library is not installed.
    peer_name: str = ""  # Or what to install.
    limit: float | None = None  # Lower bound in seconds, from a rate measured in the same run.
    items: int | None = None  # Number of items processed, to print a rate.
    # Seconds to move all bytes that our program reads and writes according to the compiler. Data
    # that stay in caches can make this longer than the task takes.
    moving: float | None = None
    memory: int | None = None  # Bytes that our program needs; None measures the process's growth.


def measure(tasks: Iterable[Task], repeats: int) -> Iterator[dict[str, Any]]:
    """Times our implementation of each task and the other one in turn, and yields its row.

    A row holds the attributes of its task, with the seconds of each repeat in `ours` and `peer`,
    the `ratio` of their medians, and in `memory` the bytes that the task knows, or else the largest
    growth of the process during one call, including its result. A
    device's `peak` is that of all bytes used up to then, if it tells.

    Raises:
        Interrupted: An interrupt arrived; raised after the call during which it did.
    """
    with exits.deferred("interrupted: finishing this measurement") as interrupted:

        def unless_interrupted(run: Call) -> None:
            if interrupted():
                raise Interrupted("the remaining tasks were not measured", interrupted.status)
            run()

        for task in tasks:
            console.say(task.name)
            calls = [task.ours, task.peer] if task.peer else [task.ours]
            calls = [functools.partial(unless_interrupted, run) for run in calls]
            ours, *others = interleaved(calls, repeats)
            peer = others[0] if others else []
            memory = _memory_growth(task.ours) if task.memory is None else task.memory
            ratio = statistics.median(peer) / statistics.median(ours) if peer else None
            beside = "" if ratio is None else f", {ratio:.3g} times as fast as {task.peer_name}"
            console.say(f"  {1e3 * statistics.median(ours):.3g} ms{beside}")
            peak = machine.memory_peaks().get("device_memory_peak")
            measured = dict(ours=ours, peer=peer, memory=memory, ratio=ratio, peak=peak)
            yield task._asdict() | measured


def interleaved(calls: Sequence[Call], repeats: int, slow: float = math.inf) -> list[list[float]]:
    """Seconds of calls in rounds, so that a change in the machine's speed affects all alike.

    A first round compiles programs. Calls that take more than `slow` seconds in it are not timed
    again. A second round says how often to repeat a fast call within a measurement. Each
    measurement of a call under a second follows an untimed one: the other calls have meanwhile
    filled the caches. Training and evaluation call the same program repeatedly, too.
    """
    first = [seconds(run) for run in calls]
    measured = [i for i, taken in enumerate(first) if taken <= slow]
    second = {i: seconds(calls[i]) for i in measured}
    times = [[taken] for taken in first]
    for i, taken in second.items():
        times[i] = [taken] if taken > _LONG else []
    rng = np.random.default_rng(0)
    for _ in range(repeats):
        for i in rng.permutation(measured):
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


def _memory_growth(run: Call) -> int | None:
    """Largest growth of the resident memory during a call; None if the system does not tell."""
    machine.return_freed_memory()  # Or the call would not grow the process.
    before = _private_memory()
    if before is None:
        return None
    grown, ended = [0], threading.Event()

    def watch() -> None:
        while not ended.wait(_SAMPLING_INTERVAL):
            grown.append(_private_memory() - before)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        run()
    finally:
        ended.set()
        watcher.join()
    return max(grown)


def _private_memory() -> int | None:
    """Resident bytes of the process without mapped files; None if the system does not tell."""
    with contextlib.suppress(OSError):
        pages = pathlib.Path("/proc/self/statm").read_text().split()
        return (int(pages[1]) - int(pages[2])) * os.sysconf("SC_PAGE_SIZE")
    return None


@functools.cache
def product_rate(dim: int, side: int = 2048, dtype: str = "float32", count: int = 50) -> float:
    """Measures operations per second of `count` products [side, dim] × [dim, side].

    Factors in float32 are multiplied at full precision.
    """
    x = (jax.random.normal(jax.random.key(0), (side, dim)) / dim**0.5).astype(dtype)
    precision = "highest" if dtype == "float32" else "default"

    @jax.jit
    def products(x: jax.Array) -> jax.Array:
        def multiply(_: int, carried: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            x, _ = carried
            result = jnp.matmul(x, x.T, precision=precision)
            # Each product depends on the one before, or the compiler would compute it once.
            return x.at[0, 0].add((1e-6 * result[0, 0]).astype(x.dtype)), result

        return jax.lax.fori_loop(0, count, multiply, (x, jnp.zeros((side, side), dtype)))[1]

    return count * 2 * side * side * dim / min_seconds(lambda: products(x))


def product_seconds(n: int, m: int, dim: int) -> float:
    """Least seconds of a float32 product [n, dim] × [dim, m], at the measured rate."""
    return 2 * n * m * dim / product_rate(dim)


def min_seconds(run: Call) -> float:
    """Least seconds of five calls that return arrays, after one that compiles."""

    def ended() -> None:
        jax.block_until_ready(run())

    ended()
    return min(seconds(ended) for _ in range(5))


def markdown(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Formats a Markdown table."""
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(cells)} |" for cells in rows)])


def table(rows: Rows) -> str:
    """Formats a Markdown table with one row per task."""
    shares = {"share of product rate": "limit", "share of copy rate": "moving"}
    shares = {title: field for title, field in shares.items() if any(row[field] for row in rows)}
    sizes = {"our memory": "memory"}
    if any(row["peak"] for row in rows):
        sizes["device's peak"] = "peak"
    lines = []
    for row in rows:
        ours, peer, items = row["ours"], row["peer"], row["items"]
        held = [row[field] for field in sizes.values()]
        bounds = [row[field] and row[field] / statistics.median(ours) for field in shares.values()]
        lines.append(
            [
                row["name"],
                f"{_format_time(ours, items)} ({min(ours):.3g}–{max(ours):.3g})",
                row["peer_name"] + (f" {_format_time(peer, items)}" if peer else ""),
                "" if row["ratio"] is None else f"{row['ratio']:.2f}",
                *("" if not share else f"{share:.0%}" for share in bounds),
                *("" if size is None else f"{size / 2**20:.0f} MiB" for size in held),
            ]
        )
    return markdown(["task", "ours", "peer", "ratio", *shares, *sizes], lines)


def _format_time(times: Sequence[float], items: int | None) -> str:
    """Formats the median, and the rate if there are items."""
    median = statistics.median(times)
    if items is None:
        return f"{median:.3g} s"
    rate = items / median
    return f"{median:.3g} s, {rate:.3g}/s" if rate < 100 else f"{median:.3g} s, {rate:,.0f}/s"
