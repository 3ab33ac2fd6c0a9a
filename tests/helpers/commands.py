"""hypjax's commands, and those that a page of documentation shows."""

import copy
import functools
import importlib
import pathlib
import re
import shlex
from collections.abc import Iterator, Sequence
from types import ModuleType

from absl.testing import flagsaver

from hypjax import command
from hypjax.cli import COMMANDS
from hypjax.config import default_config, flatten, load_config, read_config
from hypjax.errors import UserError

REPOSITORY = pathlib.Path(__file__).parents[2]

_BENCHMARKS = "benchmarks"
_FOREIGN_FLAGS = {"help", "helpfull", "signal", "requeue"}  # Absl's and Slurm's.
# FILE:VARIANT, N, <name>, ..., "$config", {cub,cars}.py, optim.*, and the reader's own files.
_PLACEHOLDER = re.compile(r"[A-Z][A-Z0-9_/:.]*|.*(\.\.\.|…|[<>$*{}]).*|(.*/)?my\w*\.py(:.*)?")
_FENCE = re.compile(r"^( *)(```+|~~~+).*?\n(.*?)^\1\2 *$", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"(?<!`)`([^`]+)`(?!`)")
_SCRIPT = re.compile(r"(?:^|[/!])launch/([\w.-]+)$")
_FIELD = re.compile(r"(?:--config\.|config\.)?((\w+)\.(\w+))(=\S+)?")
_FILE_SUFFIXES = {"py", "json", "jsonl", "md", "csv", "npz", "safetensors", "yaml", "sh", "log"}


def call(name: str, *arguments: object) -> None:
    """Runs a command in this process, without absl around it, or raises its `UserError`."""
    module = _module(name)
    saved = flagsaver.save_flag_values(module.FLAGS)
    argv = [name, *map(str, arguments)]
    try:
        module.main(*command.parse(argv, module.FLAGS, getattr(module, "CHOICES", ())))
    finally:
        flagsaver.restore_flag_values(saved, module.FLAGS)


def names() -> list[str]:
    """Modules that run as python -m hypjax.NAME."""
    return sorted(module.removeprefix("hypjax.") for module in COMMANDS.values())


def _module(name: str) -> ModuleType:
    """The module of a command, or of the benchmarks, which a clone has beside the package."""
    return importlib.import_module(
        "benchmarks.__main__" if name == _BENCHMARKS else f"hypjax.{name}"
    )


@functools.cache
def _fields() -> frozenset[str]:
    return frozenset(flatten(default_config()))


def problems(page: str) -> list[str]:
    """Commands, flags and fields of a Markdown page that do not exist, one sentence each.

    Paths are relative to the current folder, which must be the repository's.
    """
    found = []
    for check, text in (
        *((_check_line, text) for text in _fenced(page)),
        *((_check_span, text) for text in _SPAN.findall(_FENCE.sub("", page))),
    ):
        try:
            check(" ".join(text.split()))
        except UserError as error:
            found.append(f"`{text}`: {error}")
    return found


def _fenced(page: str) -> Iterator[str]:
    """Lines of fenced blocks, continuations joined, but for those that show an error."""
    for block in _FENCE.finditer(page):
        lines = re.sub(r"\\\n\s*", "", block[3]).splitlines()
        for line, after in zip(lines, [*lines[1:], ""], strict=True):
            if not after.startswith("error: "):
                yield line.strip().removeprefix("$ ")


def _check_span(text: str) -> None:
    """Checks a field, flags or a command in a sentence or a table."""
    field = _FIELD.fullmatch(text)
    if field and field[2] in {name.split(".")[0] for name in _fields() if "." in name}:
        if field[3] not in _FILE_SUFFIXES:
            _check_field(field[1])
    elif text.startswith("--"):
        for flag in re.findall(r"(?:^| )--(?:no)?(\w+)(?=[= ]|$)", text):
            _check_flag(flag)
    elif text.split()[0] in names() and " --" in text:
        _check_line(f"python -m hypjax.{text}")
    else:
        _check_line(text)


def _check_line(line: str) -> None:
    """Checks the commands of a shell's line."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="&;|")
    lexer.whitespace_split = True
    try:
        tokens = list(lexer)
    except ValueError:  # Quotes that do not match: not a command line.
        return
    words: list[str] = []
    for token in (*tokens, ";"):
        if set(token) <= set("&;|"):
            _check_command(words)
            words = []
        else:
            words.append(token)


def _check_command(tokens: Sequence[str]) -> None:
    if tokens[:1] == ["hypjax"] and tokens[1:] and tokens[1] in COMMANDS:
        _check_module(COMMANDS[tokens[1]].removeprefix("hypjax."), tokens[2:])
    for i, token in enumerate(tokens):
        if token == "-m" and tokens[i + 1].startswith(("hypjax.", _BENCHMARKS)):
            _check_module(tokens[i + 1].removeprefix("hypjax."), tokens[i + 2 :])
        if script := _SCRIPT.search(token):
            if not (REPOSITORY / "launch" / script[1]).is_file():
                raise UserError(f"there is no launch/{script[1]}")
            if script[1] in ("gpus.sh", "slurm.sh", "colab.sh", "compare.sh"):
                _check_module("tune" if script[1] == "compare.sh" else "main", tokens[i + 1 :])


def _check_module(name: str, arguments: Sequence[str]) -> None:
    if not name or _PLACEHOLDER.fullmatch(name):
        return
    if name not in (_BENCHMARKS, *names()):
        raise UserError(f"there is no command hypjax.{name}")
    module = _module(name)
    flag_values = copy.deepcopy(module.FLAGS)
    given = []
    for argument in arguments:
        flag, _, value = argument.partition("=")
        if flag.startswith("--config.") and _PLACEHOLDER.fullmatch(value):
            _check_field(flag.removeprefix("--config."))
        elif argument not in ("...", "…", "--help") and not _PLACEHOLDER.fullmatch(value):
            given.append(argument)
    parsed = command.parse([name, *given], flag_values, getattr(module, "CHOICES", ()))
    overrides = parsed[0] if flag_values.overrides else []
    if "config" in flag_values and (spec := flag_values["config"].value):
        load_config(spec, overrides) if overrides else read_config(spec)
    else:
        for override in overrides:
            _check_field(override.partition("=")[0])


def _check_flag(name: str) -> None:
    """Checks a flag outside any command: that some command has it."""
    flags_of = [_module(command).FLAGS for command in (_BENCHMARKS, *names())]
    if name not in _FOREIGN_FLAGS and not any(name in known for known in flags_of):
        raise UserError(f"no command has the flag --{name}")


def _check_field(field: str) -> None:
    """Checks a field outside any command: that some objective has it."""
    if not (field in _fields() or _PLACEHOLDER.fullmatch(field)):
        load_config("configs/glyphs.py", [f"{field}=1"])  # Raises the message that users see.
