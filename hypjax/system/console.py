"""Prints messages on stderr."""

import contextlib
import functools
import os
import sys
from collections.abc import Iterator

from hypjax.errors import on_one_line, redacted

muted = False  # Whether `mute` has silenced this process.
_warnings: list[str] = []


def say(text: str, *, always: bool = False) -> None:
    """Prints a line on stderr above any progress bar, unless muted; `always` overrides `mute`."""
    if muted and not always:
        return
    if tqdm := sys.modules.get("tqdm"):
        tqdm.tqdm.write(redacted(text), file=sys.stderr)
    else:  # The core works without tqdm, and there is no bar.
        print(redacted(text), file=sys.stderr)


def mute() -> None:
    """Silences this process except for errors: the run's first process reports for all."""
    global muted
    muted = True
    sys.stdout = open(os.devnull, "w")


def warn(text: str) -> None:
    """Prints and collects a warning; the run continues."""
    _warnings.append(redacted(text))
    say(f"warning: {on_one_line(text)}")


say_once = functools.cache(say)
warn_once = functools.cache(warn)  # For what is read several times.


def collect_warnings() -> list[str]:
    """Returns a list to which `warn` appends, until the next call."""
    global _warnings
    _warnings = []
    return _warnings


@contextlib.contextmanager
def tolerating(name: str) -> Iterator[None]:
    """Downgrades write errors on optional files to warnings."""
    try:
        yield
    except OSError as error:
        warn(f"{name} could not be written ({error.strerror})")
