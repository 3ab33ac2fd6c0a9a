"""The error class for users' mistakes, and helpers for the messages of errors."""

import contextlib
import difflib
import functools
import importlib.util
import os
import pathlib
import re
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import ParamSpec, TypeVar

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
_CLONE = pathlib.Path(__file__).resolve().parents[1]  # The repository, unless pip installed it.
INTERRUPTED = 130  # A shell's exit status after Ctrl-C.
TRY_AGAIN = 75  # EX_TEMPFAIL in sysexits.h: rerunning the same command continues.
CLOSED_PIPE = 141  # A shell's exit status when the reader of the output has ended (SIGPIPE).
_MAX_LENGTH = 4000  # Characters of a message, which may quote a file by anyone.
_CPU_TORCH = "pip install torch --index-url https://download.pytorch.org/whl/cpu"
_SIMILARITY = 0.65  # Least ratio of `difflib` at which a message suggests a name.
_MAX_LISTED = 20  # Names that a message may list.
# A URL's login, up to the last @ before the path. In the excluded schemes, the text before @ names
# a container or a repository.
_LOGIN = re.compile(r"\b(?!(?:abfss?|az|wasbs?|github)://)([a-zA-Z][\w+.-]*://)[^/?#\n]*@")
# A URL's parameter, except those that name a version or select data.
_PARAMETER = re.compile(
    r"([?&#](?!(?:versionId|generation|revision|region|subset|split|image|(?:coarse_)?label)=)"
    r"[\w.%-]+=)[^\s&#]*?(?=['\")]*(?:[\s&#]|$))"
)
# Messages of exhausted memory: XLA's, PyTorch's, and YNNPACK's, which XLA uses on CPUs.
_OUT_OF_MEMORY = re.compile(
    "(?i)RESOURCE_EXHAUSTED|out of memory|allocate memory|YNNPACK .* failed"
)
# Line breaks, other control characters, and bytes of file names that are not UTF-8.
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


def on_one_line(name: str) -> str:
    """Escapes line breaks and control characters in the name of a file or a class."""
    return _UNPRINTABLE.sub(lambda match: match[0].encode("unicode_escape").decode(), name)


def counted(number: int, noun: str) -> str:
    """Formats a number and its noun, such as '1 class' or '1,200 classes'."""
    plural = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"


def require_utf8(names: Sequence[str]) -> None:
    """Raises a `UserError` if file names are not UTF-8, because few file formats can store them."""
    invalid = [name for name in names if re.search(r"[\ud800-\udfff]", name)]
    if invalid:
        example = on_one_line(invalid[0])
        raise UserError(f"{len(invalid)} file names are not UTF-8, such as {example}; rename them")


def redacted(text: str) -> str:
    """Masks logins and parameter values, which may be secret, in the URLs of a text."""
    if "://" not in text:
        return text
    return _PARAMETER.sub(r"\1***", _LOGIN.sub(r"\1***@", text))


class UserError(ValueError):
    """An error that the user can fix; the message says what is wrong, where, and what to do."""

    status = 1  # Exit status of the program.

    def __init__(self, message: str) -> None:
        """Stores the message on one line, with secrets in URLs masked."""
        message = redacted(message)[:_MAX_LENGTH].strip()
        super().__init__("".join(c if c.isprintable() else " " for c in message))


def require_free(kind: str, name: str, taken: Collection[str]) -> None:
    """Raises a `UserError` if hypjax itself uses the name chosen for user-defined code."""
    if name in taken:
        raise UserError(f"hypjax has {kind} {name} of its own; choose another name")


def require_package(module: str, use: str, install: str) -> None:
    """Raises a `UserError` if a module is missing: `use` needs it, pip installs it as `install`."""
    if importlib.util.find_spec(module) is None:
        command = installation(install)
        if module == "torch":  # On Linux, pip would add gigabytes of CUDA.
            command = f"{command} (without a GPU, first {_CPU_TORCH})"
        raise UserError(f"{use} needs {module}: {command}")


def installation(package: str) -> str:
    """Returns pip's command for a package; an extra of hypjax is installed from a clone, if any."""
    if package.startswith("hypjax[") and (_CLONE / "setup.cfg").is_file():
        folder = "." if pathlib.Path.cwd() == _CLONE else str(_CLONE)
        return f'pip install -e "{package.replace("hypjax", folder)}"'
    return f'pip install "{package}"'


def at_the_call(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Decorates a function for notebooks: tracebacks of its `UserError`s end at its caller."""

    @functools.wraps(function)
    def wrapper(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        try:
            return function(*args, **kwargs)
        except UserError as error:
            error.__cause__ = error.__context__ = error.__traceback__ = None
            raise  # A bare raise adds no frame.

    return wrapper


@contextlib.contextmanager
def writing(path: object) -> Iterator[None]:
    """Turns an `OSError` into a `UserError` that the path cannot be written."""
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot write to {path} ({error.strerror or error})") from error


@contextlib.contextmanager
def explained(problem: str, advice: str = "") -> Iterator[None]:
    """Turns any error of a library into a `UserError` of the form 'problem (reason)advice'."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{problem} ({reason(error)}){advice}") from error


def reason(error: BaseException) -> str:
    """Returns the first line of a library's error, or the cause that the line quotes."""
    if isinstance(error, UnicodeDecodeError):
        return "it is no UTF-8 text"
    if isinstance(error, MemoryError) and not str(error):
        return "it takes too much memory"
    text = getattr(error, "strerror", None) or str(error).partition("\n")[0]
    # requests quotes the cause in "Max retries exceeded", and urllib in <urlopen error ...>.
    cause = re.search(r"\(Caused by .*?: ([^\"]+)|<urlopen error (?:\[.*?\] )?(.*)>", text)
    return (cause and cause[cause.lastindex or 0]) or text or type(error).__name__


def is_out_of_memory(error: Exception) -> bool:
    """Whether memory ran out, on the host or on a device."""
    return isinstance(error, MemoryError) or _OUT_OF_MEMORY.search(str(error)) is not None


class TryAgainError(UserError):
    """A possibly temporary error, after which the same command can succeed."""

    status = TRY_AGAIN


class Interrupted(KeyboardInterrupt):
    """An interrupt that the program handled; the message says what was saved."""

    def __init__(self, message: str, status: int = INTERRUPTED) -> None:
        super().__init__(message)
        self.status = status


@contextlib.contextmanager
def reported() -> Iterator[None]:
    """Prints a `UserError` or an `Interrupted` on one line, and exits with its status."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes stdout once more as it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(CLOSED_PIPE)
    except (UserError, Interrupted) as error:
        kind = "error:" if isinstance(error, UserError) else "interrupted;"
        print(kind, error, file=sys.stderr)
        sys.exit(error.status)
    except (AssertionError, MemoryError, RuntimeError) as error:
        problem = "JAX finds no device of those in JAX_PLATFORMS; unset it"
        if is_out_of_memory(error):
            remedy = "lower the batch size, or give fewer or smaller images or arrays"
            problem = f"out of memory ({reason(error)}); {remedy}"
        elif _has_devices():  # JAX raises these if it finds no device.
            raise
        print(f"error: {problem}", file=sys.stderr)
        sys.exit(1)


def _has_devices() -> bool:
    if "jax" not in sys.modules or "JAX_PLATFORMS" not in os.environ:
        return True
    with contextlib.suppress(AssertionError, RuntimeError):
        return bool(sys.modules["jax"].default_backend())
    return False


def similar(name: str, valid: Collection[str]) -> str:
    """Suggests the most similar valid name, as '; did you mean X?'; '' if none is similar."""
    matches = difflib.get_close_matches(name.lower(), valid, n=1, cutoff=_SIMILARITY)
    return f"; did you mean {matches[0]}?" if matches else ""


def nearest(name: str, valid: Collection[str]) -> str:
    """Lists the valid names if there are few, and suggests the most similar one."""
    listed = f"; it must be one of {', '.join(valid)}" if len(valid) <= _MAX_LISTED else ""
    closest = difflib.get_close_matches(name, valid, n=1, cutoff=0)
    return (listed + similar(name, valid)) or f"; did you mean {closest[0]}?"
