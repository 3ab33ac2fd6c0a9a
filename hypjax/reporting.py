"""What a run tells a person: messages, progress, the final table."""

import contextlib
import datetime
import json
import os
import pathlib
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tqdm

_PLAIN_SECONDS = 10  # Between progress lines where there is no terminal.

_muted = False

Recalls = Mapping[str, Mapping[str, float]]  # {"head": {"recall@1": 0.7, ...}, "encoder": ...}


def say(text: str) -> None:
    """Prints a line on stderr, beside results on stdout, without spoiling a bar."""
    if not _muted:
        say_here(text)


def say_here(text: str) -> None:
    """Prints a line on stderr that concerns this very process, muted or not."""
    tqdm.tqdm.write(text, file=sys.stderr)


def mute() -> None:
    """Leaves it to another process to tell what all of them do; errors are still told."""
    global _muted
    _muted = True
    sys.stdout = open(os.devnull, "w")


def warn(text: str) -> None:
    """Prints what a user should know of, though the run goes on."""
    say(f"warning: {text}")


@contextlib.contextmanager
def tolerating(what: str) -> Iterator[None]:
    """Warns where something that can be done without could not be written."""
    try:
        yield
    except OSError as error:
        warn(f"{what} could not be written ({error.strerror})")


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
        self._compiles = True
        self._first, self._started = first, time.monotonic()
        self._spoken = self._started
        self._bar = None
        if sys.stderr.isatty() and not _muted:
            self._bar = tqdm.tqdm(initial=first, total=total, unit="step", dynamic_ncols=True)

    def advance(self) -> None:
        """Counts one step."""
        self._step += 1
        if self._compiles:  # The first step's time tells nothing of the others'.
            self._compiles = False
            self._first, self._started = self._step, time.monotonic()
        if self._bar:
            self._bar.update()
        elif time.monotonic() - self._spoken >= _PLAIN_SECONDS or self._step == self._total:
            self._spoken = time.monotonic()
            say(self._line())

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
        line = f"step {self._step}/{self._total}  {loss}"
        if not self._rate():
            return line.rstrip()
        seconds = round((self._total - self._step) / self._rate())
        left = datetime.timedelta(seconds=seconds)
        return f"{line}{self._rate() * self._batch_size:.0f} images/s  {left} left"


def write_json(path: pathlib.Path, value: Any) -> None:
    """Writes a file that appears whole or not at all."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def write_text(path: pathlib.Path, text: str) -> None:
    """Writes a file that appears whole or not at all."""
    unfinished = path.with_name(path.name + ".unfinished")
    with unfinished.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())  # Else a power failure may leave an empty file of this name.
    unfinished.replace(path)


def noted(notes: Sequence[str]) -> dict[str, list[str]]:
    """What results hold of what is to be said of them: {"notes": [...]}, or nothing."""
    return {"notes": list(notes)} if notes else {}


def print_notes(results: Mapping[str, Any]) -> None:
    """Prints what is to be said of results, a line each."""
    for note in results.get("notes", ()):
        print(f"note: {note}")


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
