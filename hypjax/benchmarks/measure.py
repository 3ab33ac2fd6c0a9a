"""Timing of works beside their peers, interleaved, and the table of the outcome."""

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

_SAMPLES_APART = 0.01  # Seconds.
_LEAST = 0.1  # Seconds of a measurement: what is quicker is done several times.


@dataclasses.dataclass(frozen=True)
class Work:
    """Something to be timed.

    Attributes:
        name: What it is.
        ours: Does it, and waits for the result.
        peer: Does the same; None where there is nobody to compare with, or it is not installed.
        peer_name: Who that is, or what to install.
        limit: Seconds that the machine needs at least, by a rate measured in the same run.
        items: Things done, if they are to be told by the second.
        moving: Seconds that the machine would need to move the bytes which the compiler says that
            ours reads and writes; what stays in caches makes that more than it takes.
        memory: Bytes that ours needs beside the device's other work; None: to be measured.
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
class Outcome:
    """Seconds and bytes that a work took.

    Attributes:
        name: Of the work.
        ours: Seconds of each repeat.
        peer: Seconds of each of the peer's.
        peer_name: Who that is.
        limit: Seconds that the machine needs at least.
        memory: Bytes that the work is known to need; else those by which the process grew at most
            during one of ours, result included; None where the system does not tell.
        items: Things done.
        moving: Seconds that the machine would need to move ours' bytes.
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
        """How many times faster ours is, by medians."""
        if not self.peer:
            return None
        return statistics.median(self.peer) / statistics.median(self.ours)


def measure(work: Work, repeats: int) -> Outcome:
    """Times a work and its peer in turn, after each has run twice.

    Each turn begins with a call that is not timed: the other has meanwhile had the caches, and the
    system has had the memory that was given back, which takes seconds to get again where a work
    needs gigabytes. Training and evaluation call the same again and again.
    """
    console.say(work.name)
    both = [work.ours] + ([work.peer] if work.peer else [])
    for run in both:
        run()
    calls = [math.ceil(_LEAST / _seconds(run)) for run in both]
    seconds: list[list[float]] = [[] for _ in both]
    for _ in range(repeats):
        for run, count, taken in zip(both, calls, seconds, strict=True):
            run()
            taken.append(_seconds(run, count))
    memory = work.memory
    if memory is None:
        with _growth() as grown:
            work.ours()
        memory = grown.get("bytes")
    return Outcome(
        name=work.name,
        ours=seconds[0],
        peer=seconds[1] if work.peer else [],
        peer_name=work.peer_name,
        limit=work.limit,
        memory=memory,
        items=work.items,
        moving=work.moving,
    )


def _seconds(run: Callable[[], Any], count: int = 1) -> float:
    """That one of so many calls takes."""
    started = time.perf_counter()
    for _ in range(count):
        run()
    return (time.perf_counter() - started) / count


@contextlib.contextmanager
def _growth() -> Iterator[dict[str, int]]:
    """Watches how much resident memory the process gains during the body."""
    grown: dict[str, int] = {}
    before, ended = _resident(), threading.Event()
    if before is None:
        yield grown
        return

    def watch() -> None:
        while not ended.wait(_SAMPLES_APART):
            grown["bytes"] = max(grown.get("bytes", 0), _resident() - before)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield grown
    finally:
        ended.set()
        watcher.join()


def _resident() -> int | None:
    """Bytes of memory that are the process's own, without files it has mapped."""
    try:
        pages = pathlib.Path("/proc/self/statm").read_text().split()
    except OSError:
        return None
    return (int(pages[1]) - int(pages[2])) * os.sysconf("SC_PAGE_SIZE")


def product_rate(dim: int, side: int = 2048) -> float:
    """Float32 operations a second of the best matrix products of this shape, at full precision."""
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


def table(outcomes: Sequence[Outcome]) -> str:
    """A line a work, as Markdown: times, ratio, shares of the limits and memory."""
    shares = {"share of the product": "limit", "share of the copies": "moving"}
    shares = {title: of for title, of in shares.items() if any(getattr(x, of) for x in outcomes)}
    titles = ["work", "ours", "peer", "ratio", *shares, "our memory"]
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for outcome in outcomes:
        ours = statistics.median(outcome.ours)
        spread = f"{min(outcome.ours):.3g}–{max(outcome.ours):.3g}"
        peer = outcome.peer_name
        if outcome.peer:
            peer += f" {_time(outcome.peer, outcome.items)}"
        ratio = "" if outcome.ratio is None else f"{outcome.ratio:.2f}"
        parts = [getattr(outcome, of) for of in shares.values()]
        parts = ["" if part is None else f"{part / ours:.0%}" for part in parts]
        memory = "" if outcome.memory is None else f"{outcome.memory / 2**20:.0f} MiB"
        taken = f"{_time(outcome.ours, outcome.items)} ({spread})"
        cells = [outcome.name, taken, peer, ratio, *parts, memory]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _time(seconds: Sequence[float], items: int | None) -> str:
    """The median, and how many things a second that is."""
    median = statistics.median(seconds)
    if items is None:
        return f"{median:.3g} s"
    rate = items / median
    return f"{median:.3g} s, {rate:.3g}/s" if rate < 100 else f"{median:.3g} s, {rate:,.0f}/s"


def as_json(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """The outcomes for programs, with the ratios."""
    return [dataclasses.asdict(outcome) | {"ratio": outcome.ratio} for outcome in outcomes]
