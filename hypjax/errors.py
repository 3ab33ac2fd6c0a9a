"""The one class for users' mistakes, and the one place that prints them."""

import contextlib
import os
import sys
from collections.abc import Iterator


class UserError(Exception):
    """A mistake the user can mend; the message says what is wrong, where, and what to do."""


class Interrupted(KeyboardInterrupt):
    """An interrupt from the keyboard that was prepared for; the message says what is saved."""


@contextlib.contextmanager
def reported() -> Iterator[None]:
    """Prints a `UserError` as one sentence on stderr and exits with status 1.

    Commands wrap their whole body in it; library code only raises. An interrupt from the keyboard
    exits with the shell's status for it.
    """
    try:
        yield
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt as interrupt:
        saved = "the same command goes on from the last checkpoint, if any"
        print(f"interrupted; {interrupt if str(interrupt) else saved}", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(130)  # Whatever a thread was computing would crash the interpreter's own exit.
