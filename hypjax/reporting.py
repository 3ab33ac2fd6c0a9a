"""What a run tells: progress on the terminal, metrics.jsonl, results.json, the final table."""

import datetime
import json
import pathlib
import sys
import time
from collections.abc import Mapping
from typing import Any

import tqdm

_PLAIN_SECONDS = 10  # Between progress lines where there is no terminal.

Recalls = Mapping[str, Mapping[str, float]]  # {"head": {"recall@1": 0.7, ...}, "encoder": ...}


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
        self._loss = float("nan")
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

    def say(self, text: str) -> None:
        """Prints a line without spoiling the bar."""
        tqdm.tqdm.write(text, file=sys.stderr)

    def close(self) -> None:
        """Leaves the bar as it stands."""
        if self._bar:
            self._bar.close()

    def _rate(self) -> float:
        return (self._step - self._first) / max(time.monotonic() - self._started, 1e-9)

    def _line(self) -> str:
        seconds = round((self._total - self._step) / max(self._rate(), 1e-9))
        return (
            f"step {self._step}/{self._total}  loss {self._loss:.4f}  "
            f"{self._rate() * self._batch_size:.0f} images/s  "
            f"{datetime.timedelta(seconds=seconds)} left"
        )


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
