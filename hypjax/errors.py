"""The one class for users' mistakes, and the one place that prints them."""

import contextlib
import sys
from collections.abc import Iterator


class UserError(Exception):
    """A mistake the user can mend; the message says what is wrong, where, and what to do."""


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
    except KeyboardInterrupt:
        print(
            "interrupted; the same command goes on from the last checkpoint, if any",
            file=sys.stderr,
        )
        sys.exit(130)
