"""The one class for users' mistakes, and the one place that prints them."""

import contextlib
import difflib
import os
import sys
from collections.abc import Collection, Iterator

INTERRUPTED = 130  # The shell's status for an interrupt from the keyboard.
TRY_AGAIN = 75  # EX_TEMPFAIL of sysexits.h: the same command, typed again, goes on.
CLOSED_PIPE = 141  # The same where output went to a program that ended.


class UserError(Exception):
    """A mistake the user can mend; the message says what is wrong, where, and what to do.

    Attributes:
        status: With which the program is to end.
    """

    status = 1


class TryAgainError(UserError):
    """What may be no mistake at all: the same command can succeed later."""

    status = TRY_AGAIN


class StalledError(TryAgainError):
    """Something that was waited for did not come in time."""


class Interrupted(KeyboardInterrupt):
    """An interrupt that was prepared for; the message says what is saved.

    Attributes:
        status: With which the program is to end.
    """

    def __init__(self, message: str, status: int = INTERRUPTED) -> None:
        """Takes the message and the status."""
        super().__init__(message)
        self.status = status


@contextlib.contextmanager
def reported() -> Iterator[None]:
    """Prints a `UserError` as one sentence on stderr and exits with its status.

    Commands wrap their whole body in it; library code only raises. After an interrupt that was
    prepared for it exits with the interrupt's status, and quietly where nobody reads on.
    """
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # For Python's own flush.
        sys.exit(CLOSED_PIPE)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.status)
    except Interrupted as interrupt:
        print(f"interrupted; {interrupt}", file=sys.stderr)
        sys.exit(interrupt.status)


def nearest(name: str, valid: Collection[str]) -> str:
    """Returns '; did you mean X?' with the most similar of some valid names."""
    return f"; did you mean {difflib.get_close_matches(name, valid, n=1, cutoff=0)[0]}?"
