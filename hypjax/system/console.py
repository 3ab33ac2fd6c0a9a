"""Messages and progress of a run, on stderr."""

import contextlib
import datetime
import os
import sys
import time
from collections.abc import Iterator, Mapping

import tqdm

from hypjax.errors import redacted

_LINE_INTERVAL = 10  # Seconds between progress lines if stderr is no terminal.

_muted = False
_warnings: list[str] = []


def say(text: str) -> None:
    """Prints a line on stderr, above a progress bar if there is one."""
    if not _muted:
        say_here(text)


def say_here(text: str) -> None:
    """Prints a line on stderr even if this process is muted."""
    tqdm.tqdm.write(redacted(text), file=sys.stderr)


def mute() -> None:
    """Silences this process, except for errors: the first process speaks for all of them."""
    global _muted
    _muted = True
    sys.stdout = open(os.devnull, "w")


def warn(text: str) -> None:
    """Prints a warning; the run continues."""
    _warnings.append(redacted(text))
    say(f"warning: {text}")


def collect_warnings() -> list[str]:
    """Returns a list to which all further warnings are added, until the next call."""
    global _warnings
    _warnings = []
    return _warnings


@contextlib.contextmanager
def tolerating(name: str) -> Iterator[None]:
    """Turns a failure to write something dispensable into a warning."""
    try:
        yield
    except OSError as error:
        warn(f"{name} could not be written ({error.strerror})")


class Progress:
    """A progress bar on a terminal, or else one line every ten seconds."""

    def __init__(self, first: int, total: int, batch_size: int) -> None:
        """Starts the display.

        Args:
            first: Number of steps already done.
            total: Number of steps in the whole run.
            batch_size: Images per step.
        """
        self._step, self._total, self._batch_size = first, total, batch_size
        self._latest = ""
        self._compiling = True
        self._first, self._started = first, time.monotonic()
        self._last_line = self._started
        self._bar = None
        if sys.stderr.isatty() and not _muted:
            self._bar = tqdm.tqdm(initial=first, total=total, unit="step", dynamic_ncols=True)

    def advance(self) -> None:
        """Counts one step."""
        self._step += 1
        if self._compiling:  # The first step compiles: leave it out of the rate.
            self._compiling = False
            self._first, self._started = self._step, time.monotonic()
        if self._bar:
            self._bar.update()
        elif time.monotonic() - self._last_line >= _LINE_INTERVAL and self._step < self._total:
            self._last_line = time.monotonic()
            say(self._line())

    def show(self, values: Mapping[str, float]) -> None:
        """Shows the latest loss, its level at chance, the learning rate and the recall.

        Call it after the last step: only then is the last line printed.
        """
        known = {
            "loss": "loss {:.4f}",
            "chance_loss": "(chance {:.1f})",
            "learning_rate": " lr {:.1e}",
            "batch_recall@1": " batch recall@1 {:.3f}",
        }
        shown = (text.format(values[name]) for name, text in known.items() if name in values)
        self._latest = " ".join(shown)
        if self._bar:
            rate = f"{self._rate() * self._batch_size:.0f} images/s"
            self._bar.set_postfix_str(f"{self._latest}  {rate}")
        elif self._step == self._total:
            say(self._line())

    def close(self) -> None:
        """Closes the bar and leaves it on the screen."""
        if self._bar:
            self._bar.close()

    def _rate(self) -> float:
        return (self._step - self._first) / max(time.monotonic() - self._started, 1e-9)

    def _line(self) -> str:
        line = f"step {self._step}/{self._total}  {self._latest}".rstrip() + "  "
        if not self._rate():
            return line.rstrip()
        seconds = round((self._total - self._step) / self._rate())
        left = datetime.timedelta(seconds=seconds)
        return f"{line}{self._rate() * self._batch_size:.0f} images/s  {left} left"
