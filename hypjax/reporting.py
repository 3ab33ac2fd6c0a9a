"""What a run tells: progress on the terminal, metrics.jsonl, results.json, the final table."""

import contextlib
import datetime
import json
import pathlib
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
import tqdm

_PLAIN_SECONDS = 10  # Between progress lines where there is no terminal.

Recalls = Mapping[str, Mapping[str, float]]  # {"head": {"recall@1": 0.7, ...}, "encoder": ...}


def say(text: str) -> None:
    """Prints a line on stderr, beside results on stdout, without spoiling a bar."""
    tqdm.tqdm.write(text, file=sys.stderr)


class Progress:
    """A bar on a terminal, and a line every ten seconds elsewhere."""

    def __init__(self, first: int, total: int, batch_size: int) -> None:
        """Starts at a step.

        Args:
            first: Steps already done.
            total: Steps of the whole run.
            batch_size: Images of a step.
        """
        self._step, self._total, self._batch_size = first, total, batch_size
        self._loss: float | None = None
        self._first, self._started = first, time.monotonic()
        self._spoken = self._started
        self._bar = None
        if sys.stderr.isatty():
            self._bar = tqdm.tqdm(initial=first, total=total, unit="step", dynamic_ncols=True)

    def advance(self) -> None:
        """Counts one step."""
        self._step += 1
        if self._bar:
            self._bar.update()
        elif time.monotonic() - self._spoken >= _PLAIN_SECONDS or self._step == self._total:
            self._spoken = time.monotonic()
            print(self._line(), file=sys.stderr, flush=True)

    def show(self, loss: float) -> None:
        """Shows the latest loss."""
        self._loss = loss
        if self._bar:
            self._bar.set_postfix_str(
                f"loss {loss:.4f}, {self._rate() * self._batch_size:.0f} images/s"
            )

    def close(self) -> None:
        """Leaves the bar as it stands."""
        if self._bar:
            self._bar.close()

    def _rate(self) -> float:
        return (self._step - self._first) / max(time.monotonic() - self._started, 1e-9)

    def _line(self) -> str:
        loss = "" if self._loss is None else f"loss {self._loss:.4f}  "
        seconds = round((self._total - self._step) / max(self._rate(), 1e-9))
        return (
            f"step {self._step}/{self._total}  {loss}"
            f"{self._rate() * self._batch_size:.0f} images/s  "
            f"{datetime.timedelta(seconds=seconds)} left"
        )


class Meter:
    """Collects what steps return, and times how long they wait for their input.

    At most two steps are under way at once: while one computes, the next one's input is fetched.
    A wait during which the device computes counts as well, so the share is an upper bound.
    """

    def __init__(self, batch_size: int) -> None:
        """Starts the clock.

        Args:
            batch_size: Images of a step.
        """
        self._batch_size = batch_size
        self._metrics: list[Mapping[str, Any]] = []
        self._all_steps, self._all_seconds, self._all_wait = 0, 0.0, 0.0
        self.restart_clock()

    def restart_clock(self) -> None:
        """Leaves out of the rates what happened since the last reading, such as a compilation."""
        jax.block_until_ready(self._metrics[-1:])
        self._steps, self._wait, self._started = 0, 0.0, time.monotonic()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Times the body as waiting for input."""
        started = time.monotonic()
        yield
        self._wait += time.monotonic() - started

    def add(self, metrics: Mapping[str, Any]) -> None:
        """Takes a step's metrics, and lets the step before it finish."""
        jax.block_until_ready(self._metrics[-1:])
        self._metrics.append(metrics)
        self._steps += 1

    def read(self) -> dict[str, float]:
        """Means since the last reading, images a second, and the share of time spent waiting."""
        metrics = jax.device_get(self._metrics)
        seconds = time.monotonic() - self._started
        values = {name: float(np.mean([m[name] for m in metrics])) for name in metrics[0]}
        if self._steps:
            values["images_per_second"] = self._steps * self._batch_size / seconds
            values["input_wait"] = self._wait / seconds
        self._all_steps += self._steps
        self._all_seconds += seconds
        self._all_wait += self._wait
        self._metrics = []
        self.restart_clock()
        return values

    def summary(self) -> str:
        """One line about all readings together."""
        seconds = max(self._all_seconds, 1e-9)
        rate = self._all_steps * self._batch_size / seconds
        return f"{rate:.0f} images/s, {self._all_wait / seconds:.1%} of the time waiting for input"


class MetricsLog:
    """Appends one JSON object a line to a file; a resumed run continues it."""

    def __init__(self, path: pathlib.Path, first_step: int) -> None:
        """Opens the file and drops what a lost run wrote after the step that is resumed."""
        kept = []
        if path.exists():
            kept = [line for line in path.read_text().splitlines() if _step(line) <= first_step]
        path.write_text("".join(line + "\n" for line in kept))
        self._file = path.open("a", buffering=1)

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Writes the values of a step."""
        self._file.write(json.dumps({"step": step, **values}) + "\n")

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def _step(line: str) -> float:
    """The step of a line, or infinity where a killed run left half of one."""
    try:
        return json.loads(line)["step"]
    except ValueError:
        return float("inf")


def write_json(path: pathlib.Path, value: Any) -> None:
    """Writes a file that appears whole or not at all."""
    unfinished = path.with_name(path.name + ".unfinished")
    unfinished.write_text(json.dumps(value, indent=2) + "\n")
    unfinished.replace(path)


def format_recalls(recalls: Recalls) -> str:
    """One line: 'head recall@1 0.7012, encoder recall@1 0.6543'."""
    first = {part: next(iter(values.items())) for part, values in recalls.items()}
    return ", ".join(f"{part} {name} {value:.4f}" for part, (name, value) in first.items())


def format_results(results: Mapping[str, Recalls]) -> str:
    """A table of recalls: a row for each state of the model and each of its two embeddings.

    Args:
        results: {"untrained": {"head": {"recall@1": ...}, "encoder": ...}, "final": ...}.
    """
    rows = [
        (state, part, values) for state, parts in results.items() for part, values in parts.items()
    ]
    names = list(rows[0][2])
    width = max(len(state) for state, _, _ in rows)
    lines = [" " * width + "           " + "".join(f"{name:>13}" for name in names)]
    for state, part, values in rows:
        lines.append(
            f"{state:<{width}}  {part:<8} " + "".join(f"{values[n]:>13.4f}" for n in names)
        )
    return "\n".join(lines)
