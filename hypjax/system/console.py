"""Messages and progress of a run, on stderr."""

import contextlib
import datetime
import os
import sys
import time
from collections.abc import Iterator

import tqdm

_PLAIN_SECONDS = 10  # Between progress lines where there is no terminal.

_muted = False


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
