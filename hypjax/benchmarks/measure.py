"""Times tasks alternately with those of other libraries, and prints the table."""

import contextlib
import dataclasses
import math
import os
import pathlib
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from hypjax.system import console

_SAMPLING_INTERVAL = 0.01  # Seconds between samples of the memory.
_MIN_SECONDS = 0.1  # Of a measurement; faster tasks are repeated within it.


@dataclasses.dataclass(frozen=True)
class Task:
    """Something to time.

    Attributes:
        name: Description for the table.
        ours: Performs the task and waits for the result.
        peer: Does the same with another library; None without one, or if it is not installed.
        peer_name: Name of the other library, or what to install.
        limit: Lower bound in seconds, from a rate measured in the same run.
        items: Number of items processed, to print a rate; None prints none.
        moving: Seconds to move all bytes that our program reads and writes according to the
            compiler. Data that stay in caches can make this longer than the task takes.
        memory: Bytes that our program needs; None to measure the growth of the process.
    """

    name: str
    ours: Callable[[], Any]
    peer: Callable[[], Any] | None
    peer_name: str
    limit: float | None = None
    items: int | None = None
    moving: float | None = None
    memory: int | None = None


@dataclasses.dataclass(frozen=True)
class Measurement:
    """Time and memory that a task took.

    Attributes:
        name: Description of the task.
        ours: Seconds of each of our repeats.
        peer: Seconds of each repeat of the other library.
        peer_name: Name of the other library.
        limit: Lower bound in seconds.
        memory: Bytes, as known for the task; otherwise the largest growth of the process during one
            call of ours, including its result; None if the system does not report it.
        items: Number of items processed.
        moving: Seconds to move all bytes that our program reads and writes.
    """

    name: str
    ours: list[float]
    peer: list[float]
    peer_name: str
    limit: float | None
    memory: int | None
    items: int | None = None
    moving: float | None = None

    @property
    def ratio(self) -> float | None:
        """Speed-up over the other library, from the medians."""
        if not self.peer:
            return None
        return statistics.median(self.peer) / statistics.median(self.ours)


def measure(task: Task, repeats: int) -> Measurement:
    """Times our implementation and the other one alternately, after two warm-up calls each.

    Every measurement starts with an untimed call, since the other implementation has meanwhile
    filled the caches, and memory returned to the system takes seconds to get back for tasks that
    need gigabytes. Training and evaluation call the same program repeatedly, too.
    """
    console.say(task.name)
    calls = [task.ours] + ([task.peer] if task.peer else [])
    for run in calls:
        run()
    counts = [math.ceil(_MIN_SECONDS / _mean_seconds(run)) for run in calls]
    seconds: list[list[float]] = [[] for _ in calls]
    for _ in range(repeats):
        for run, count, times in zip(calls, counts, seconds, strict=True):
            run()
            times.append(_mean_seconds(run, count))
    memory = task.memory
    if memory is None:
        with _memory_growth() as grown:
            task.ours()
        memory = grown.get("bytes")
    return Measurement(
        name=task.name,
        ours=seconds[0],
        peer=seconds[1] if task.peer else [],
        peer_name=task.peer_name,
        limit=task.limit,
        memory=memory,
        items=task.items,
        moving=task.moving,
    )


def _mean_seconds(run: Callable[[], Any], count: int = 1) -> float:
    started = time.perf_counter()
    for _ in range(count):
        run()
    return (time.perf_counter() - started) / count


@contextlib.contextmanager
def _memory_growth() -> Iterator[dict[str, int]]:
    """Records the largest growth of the resident memory during the body, under "bytes"."""
    grown: dict[str, int] = {}
    before, ended = _private_memory(), threading.Event()
    if before is None:
        yield grown
        return

    def watch() -> None:
        while not ended.wait(_SAMPLING_INTERVAL):
            grown["bytes"] = max(grown.get("bytes", 0), _private_memory() - before)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield grown
    finally:
        ended.set()
        watcher.join()


def _private_memory() -> int | None:
    """Resident bytes of the process without mapped files; None if the system does not tell."""
    try:
        pages = pathlib.Path("/proc/self/statm").read_text().split()
    except OSError:
        return None
    return (int(pages[1]) - int(pages[2])) * os.sysconf("SC_PAGE_SIZE")


def product_rate(dim: int, side: int = 2048) -> float:
    """Measures float32 operations per second of [side, dim] × [dim, side] at full precision."""
    key = jax.random.key(0)
    x = jax.random.normal(key, (side, dim))

    @jax.jit
    def products(x: jax.Array) -> jax.Array:
        def multiply(_: int, carried: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            x, _ = carried
            result = jax.numpy.matmul(x, x.T, precision="highest")
            return x.at[0, 0].add(1e-6 * result[0, 0]), result

        return jax.lax.fori_loop(0, 50, multiply, (x, jax.numpy.zeros((side, side))))[1]

    products(x).block_until_ready()
    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        products(x).block_until_ready()
        seconds.append(time.perf_counter() - started)
    return 50 * 2 * side * side * dim / min(seconds)


def table(measurements: Sequence[Measurement]) -> str:
    """Formats a Markdown table with one row per task."""
    shares = {"share of product rate": "limit", "share of copy rate": "moving"}
    shares = {
        title: field
        for title, field in shares.items()
        if any(getattr(x, field) for x in measurements)
    }
    titles = ["task", "ours", "peer", "ratio", *shares, "our memory"]
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for measurement in measurements:
        ours = statistics.median(measurement.ours)
        spread = f"{min(measurement.ours):.3g}–{max(measurement.ours):.3g}"
        peer = measurement.peer_name
        if measurement.peer:
            peer += f" {_format_time(measurement.peer, measurement.items)}"
        ratio = "" if measurement.ratio is None else f"{measurement.ratio:.2f}"
        bounds = [getattr(measurement, field) for field in shares.values()]
        bounds = ["" if bound is None else f"{bound / ours:.0%}" for bound in bounds]
        memory = "" if measurement.memory is None else f"{measurement.memory / 2**20:.0f} MiB"
        elapsed = f"{_format_time(measurement.ours, measurement.items)} ({spread})"
        cells = [measurement.name, elapsed, peer, ratio, *bounds, memory]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _format_time(seconds: Sequence[float], items: int | None) -> str:
    """Formats the median, and the rate if there are items."""
    median = statistics.median(seconds)
    if items is None:
        return f"{median:.3g} s"
    rate = items / median
    return f"{median:.3g} s, {rate:.3g}/s" if rate < 100 else f"{median:.3g} s, {rate:,.0f}/s"


def as_json(measurements: Sequence[Measurement]) -> list[dict[str, Any]]:
    """Converts measurements for benchmark.json, with the ratios."""
    return [
        dataclasses.asdict(measurement) | {"ratio": measurement.ratio}
        for measurement in measurements
    ]
