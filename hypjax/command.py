"""What every command shares: flags in, one call, mistakes answered in one sentence."""

import contextlib
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from absl import app, flags, logging

from hypjax import errors
from hypjax.parallel import watchdog
from hypjax.system import exits, interrupts

_OVERRIDE = "--config."


def run(main: Callable[..., None], choices: Sequence[str] = ()) -> None:
    """Parses the command line and calls `main` with its overrides of the configuration.

    Where there are choices, one of them may be named without a flag, and is passed too, or None.

    Flags of the form --config.FIELD=VALUE are collected as 'FIELD=VALUE'; all others are absl's.
    A user's mistake is answered in one sentence, without a traceback.
    """
    warnings.showwarning = _show_warning
    for number in interrupts.ENDING:
        signal.signal(number, _end)
    try:
        with watchdog.announced_exit(), errors.reported():
            app.run(lambda parsed: main(*parsed), flags_parser=lambda argv: _parse(argv, choices))
    except BaseException as error:  # Also the ordinary end, which absl makes an exception.
        if exits.is_stuck():
            _leave(error)
        raise


def require(*names: str) -> None:
    """Refuses to go on without flags that a command cannot do without."""
    for name in names:
        if not flags.FLAGS[name].value:
            raise errors.UserError(f"--{name} is missing (--help tells what it is)")


def refuse_overrides(overrides: list[str]) -> None:
    """What a command does that takes no configuration."""
    if overrides:
        raise errors.UserError(
            f"this command takes no configuration, but got --config.{overrides[0]}"
        )


def _leave(error: BaseException) -> NoReturn:
    """Ends the program as Python would after an exception, but waits for no thread or worker."""
    if not isinstance(error, SystemExit):
        traceback.print_exc()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    exits.at_once((error.code or 0) if isinstance(error, SystemExit) else 1)


def _end(signum: int, frame: object) -> None:
    """Ends the program at once; training holds interrupts back until its state is saved.

    As an exception, an interrupt can be lost in a callback, or crash threads at the exit.
    """
    del frame
    os.write(2, b"\ninterrupted; the same command goes on from what was saved, if anything\n")
    exits.at_once(interrupts.ENDING[signum])


def _show_warning(message: Warning | str, *args: object, **kwargs: object) -> None:
    """Prints a warning as a line, without the place in the code that gave it."""
    print(f"warning: {message}", file=sys.stderr)


def _parse(argv: Sequence[str], choices: Sequence[str]) -> list[Any]:
    overrides = [arg.removeprefix(_OVERRIDE) for arg in argv if arg.startswith(_OVERRIDE)]
    try:
        rest = flags.FLAGS([arg for arg in argv if not arg.startswith(_OVERRIDE)])
    except SystemExit:
        sys.exit(0)  # Help was asked for and given, which absl counts as a failure.
    except flags.UnrecognizedFlagError as error:
        raise errors.UserError(
            f"unknown flag --{error.flagname} (--help lists the flags)"
        ) from error
    except flags.Error as error:
        raise errors.UserError(f"{error} (--help lists the flags)") from error
    if not flags.FLAGS["verbosity"].present:
        logging.set_verbosity(logging.WARNING)  # Orbax tells of every file it writes.
    named = rest[1:]
    if len(named) > bool(choices):
        raise errors.UserError(f"unexpected argument {named[-1]!r}; flags are written --NAME=VALUE")
    if named and named[0] not in choices:
        raise errors.UserError(f"{named[0]!r} is not one of {', '.join(choices)}")
    return [overrides, *(named or [None])] if choices else [overrides]
