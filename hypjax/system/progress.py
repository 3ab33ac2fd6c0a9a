"""Progress of long work: bars on a terminal, lines in a log."""

import sys
import time
from collections.abc import Mapping

import tqdm

from hypjax.system import console

_LINE_INTERVAL = 10  # Seconds between progress lines if stderr is no terminal.
# Formats of the values in a progress line, the most important first.
_FORMATS = {
    "left": "  {} left",
    "loss": "  loss {:.4g}",
    "chance_loss": " (chance {:.1f})",
    "batch_recall@1": "  R@1 {:.3f}",
    "images": "  {:.0f} img/s",
    "learning_rate": "  lr {:.1e}",
}


class Bar(tqdm.tqdm):
    """tqdm's bar without its monitor thread, which aborted a few of a hundred processes at exit."""

    monitor_interval = 0


def image_bar(total: int, desc: str | None = None, initial: int = 0) -> Bar:
    """Counts images on a terminal, in a bar that vanishes at the end."""
    return Bar(total=total, desc=desc, initial=initial, unit="image", disable=None, leave=False)


class ProgressLines:
    """Counts processed images in a line every ten seconds, for logs."""

    def __init__(self, verb: str, total: int, done: int = 0) -> None:
        self._verb, self._total, self._done = verb, total, done
        self._last_line = time.monotonic()

    def advance(self, count: int) -> None:
        """Adds processed images; prints a line if one is due."""
        self._done += count
        if time.monotonic() - self._last_line >= _LINE_INTERVAL and self._done < self._total:
            self._last_line = time.monotonic()
            console.say(f"{self._verb} {self._done}/{self._total} images")


class Progress:
    """Training progress: a bar on a terminal, otherwise a line every ten seconds."""

    def __init__(self, first: int, total: int, batch_size: int) -> None:
        self._step, self._total, self._batch_size = first, total, batch_size
        self._values: Mapping[str, float] = {}
        self._last_line = time.monotonic()
        # The rate counts from the end of the first step, whose time is mostly compilation.
        self._rate_start: tuple[int, float] | None = None  # That step, and the time of its end.
        hidden, form = console.muted or not sys.stderr.isatty(), "{n}/{total} {bar}{desc}"
        self._bar = Bar(
            initial=first, total=total, disable=hidden, dynamic_ncols=True, bar_format=form
        )

    def advance(self) -> None:
        """Counts one step."""
        self._step += 1
        if self._rate_start is None:
            self._rate_start = self._step, time.monotonic()
            console.say(f"training until step {self._total}")
        is_due = time.monotonic() - self._last_line >= _LINE_INTERVAL and self._step < self._total
        self._refresh(is_due)
        self._bar.update()

    def show(self, values: Mapping[str, float]) -> None:
        """Shows the latest metrics; after the last step, prints them even if no line is due."""
        self._values = values
        self._refresh(self._step == self._total)

    def _refresh(self, is_due: bool) -> None:
        if not self._bar.disable:
            self._bar.set_description_str(self._description(), refresh=False)
        elif is_due:
            self._last_line = time.monotonic()
            console.say(f"step {self._step}/{self._total}{self._description()}")

    def close(self) -> None:
        """Closes the bar and leaves it on the screen."""
        self._bar.close()

    def _description(self) -> str:
        """Formats the latest values, most important first: tqdm truncates what does not fit."""
        values = dict(self._values)
        first_step, start = self._rate_start or (self._step, 0)
        if self._step > first_step:
            rate = (self._step - first_step) / max(time.monotonic() - start, 1e-9)
            values["left"] = Bar.format_interval((self._total - self._step) / rate)
            values["images"] = rate * self._batch_size
        formats = _FORMATS.items()
        return "".join(form.format(values[name]) for name, form in formats if name in values)
