"""hypjax's commands, and those that a page of documentation shows."""

import copy
import functools
import importlib
import pathlib
import re
import shlex
from collections.abc import Iterator, Sequence

from absl import flags
from absl.testing import flagsaver

from hypjax import command
from hypjax.cli import COMMANDS
from hypjax.config import default_config, flatten, load_config, read_config
from hypjax.errors import UserError

REPOSITORY = pathlib.Path(__file__).parents[2]

# Arguments that come before the flags of hypjax.main.
_POSITIONAL = {"gpus": 0, "slurm": 0, "colab": 0, "tpu_vm": 2}
# Those of absl and Slurm; none with hyphens is checked.
_FOREIGN_FLAGS = {"help", "helpfull", "signal", "requeue"}
_HELP = {"--help", "--helpshort", "--helpfull"}
_ELLIPSES = ("...", "…")
# FILE:VARIANT, N, <name>, ..., "$config", {cub,cars}.py, optim.*
_PLACEHOLDER = re.compile(r"[A-Z][A-Z0-9_/:.]*|.*(\.\.\.|…|[<>$*{}]).*")
_READERS_COMMAND = "spread"  # Which docs/extending.md adds.
_READERS_FILE = re.compile(r"(.*/)?my\w*\.py(:.*)?")  # Such as configs/my_photos.py.
_FENCE = re.compile(r"^( *)(```+|~~~+).*?\n(.*?)^\1\2 *$", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"(?<!`)`([^`]+)`(?!`)")
_SCRIPT = re.compile(r"(?:^|[/!])launch/([\w.-]+)$")
_FILE_SUFFIXES = {"py", "json", "jsonl", "md", "csv", "npz", "safetensors", "yaml", "sh", "log"}


def call(name: str, *arguments: object) -> None:
    """Runs a command in this process, without absl around it, or raises its `UserError`."""
    module = "benchmarks.__main__" if name == "benchmarks" else f"hypjax.{name}"
    module = importlib.import_module(module)
    saved = flagsaver.save_flag_values(module.FLAGS)
    argv = [name, *map(str, arguments)]
    try:
        module.main(*command.parse(argv, module.FLAGS, getattr(module, "CHOICES", ())))
    finally:
        flagsaver.restore_flag_values(saved, module.FLAGS)


def names() -> list[str]:
    """Modules that run as python -m hypjax.NAME."""
    return sorted(module.removeprefix("hypjax.") for module in COMMANDS.values())


@functools.cache
def _fields() -> frozenset[str]:
    return frozenset(flatten(default_config()))


def problems(page: str) -> list[str]:
    """Commands, flags and fields of a Markdown page that do not exist, one sentence each.

    Paths are relative to the current folder, which must be the repository's.
    """
    found = []
    for text, shown in (*_fenced(page), *((text, None) for text in _inline(page))):
        try:
            _check(text)
            message = None
        except UserError as error:
            message = f"error: {error}"
        if message != shown:
            expected = f" (the page shows: {shown})" if shown else ""
            found.append(f"`{text}`: {message}{expected}")
    return found


def _fenced(page: str) -> Iterator[tuple[str, str | None]]:
    """Lines of fenced blocks, continuations joined, with the error that follows, if any."""
    for block in _FENCE.finditer(page):
        lines = re.sub(r"\\\n\s*", "", block[3]).splitlines()
        for line, after in zip(lines, [*lines[1:], ""], strict=True):
            error = after.strip() if after.strip().startswith("error: ") else None
            if re.search(r"\bhypjax[. ]|launch/", line):
                yield line.strip().removeprefix("$ "), error


def _inline(page: str) -> Iterator[str]:
    """Spans of inline code outside fenced blocks; `group.a`, `.b` is read as `group.b`."""
    prose = _FENCE.sub("", page)
    while prose != (expanded := re.sub(r"(`(\w+)\.\w+`, )`\.(\w+)`", r"\1`\2.\3`", prose)):
        prose = expanded
    for span in _SPAN.findall(prose):
        yield " ".join(span.split())


def _check(text: str) -> None:
    """Raises a `UserError` if the text is a command or a field that would be refused."""
    groups = {field.split(".")[0] for field in _fields() if "." in field}
    if field := re.fullmatch(r"(?:config\.)?((\w+)\.(\w+))(=\S+)?", text):
        if field[2] in groups and field[3] not in _FILE_SUFFIXES:
            _check_field(field[1] + (field[4] or ""))
            return
    if text.startswith("--"):
        for token in text.split():
            if token.startswith("--config."):
                _check_field(token.removeprefix("--config."))
            elif flag := re.fullmatch(r"--(?:no)?(\w+)(=.*)?", token):
                _check_flag(flag[1])
        return
    known = text.split()[0] in ("hypjax", *names())
    if not known and "hypjax." not in text and "launch/" not in text:
        return
    for tokens in _simple_commands(text):
        if tokens[0] in names() and any(token.startswith("--") for token in tokens):
            tokens = ["python", "-m", f"hypjax.{tokens[0]}", *tokens[1:]]  # As in a table.
        _check_command(tokens)


def _simple_commands(line: str) -> Iterator[list[str]]:
    """Splits a command line at &&, ; and | into its commands, and each into its words."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="&;|")
    lexer.whitespace_split = True
    try:
        tokens = list(lexer)
    except ValueError:  # Quotes that do not match: not a command line.
        return
    words: list[str] = []
    for token in (*tokens, ";"):
        if set(token) <= set("&;|"):
            if words:
                yield words
            words = []
        else:
            words.append(token)


def _check_command(tokens: Sequence[str]) -> None:
    if tokens[:1] == ["hypjax"] and tokens[1:]:
        if tokens[1] not in _HELP | {_READERS_COMMAND} - COMMANDS.keys():
            module = COMMANDS.get(tokens[1], tokens[1])
            _check_module(module.removeprefix("hypjax."), tokens[2:])
        return
    for i, token in enumerate(tokens):
        if token == "-m" and i + 1 < len(tokens) and tokens[i + 1].startswith("hypjax."):
            _check_module(tokens[i + 1].removeprefix("hypjax."), tokens[i + 2 :])
            return
        if script := _SCRIPT.search(token):
            _check_script(script[1], tokens[i + 1 :])
            return


def _check_script(script: str, arguments: Sequence[str]) -> None:
    if not (REPOSITORY / "launch" / script).is_file():
        raise UserError(f"there is no launch/{script}")
    name = script.removesuffix(".sh")
    if name == "until_done":
        _check_command(arguments)
    elif name == "seeds" and arguments:
        config, *seeds = arguments
        _check_script("sweep.sh", [config, "seed", *seeds])
    elif name == "sweep" and arguments:
        config, field, *rest = arguments
        others = [arg.removeprefix("--config.") for arg in rest if arg.startswith("--config.")]
        for value in rest:
            if not value.startswith("--"):
                _check_config(config, [*others, f"{field}={value}"])
    elif name == "compare":
        _check_module("tune", arguments)
    elif name in _POSITIONAL and arguments[2:] != ["stop"]:
        _check_module("main", arguments[_POSITIONAL[name] :])


def _check_module(name: str, arguments: Sequence[str]) -> None:
    if not name or _PLACEHOLDER.fullmatch(name):
        return
    if name not in names():
        raise UserError(f"there is no command hypjax.{name}")
    module = importlib.import_module(f"hypjax.{name}")
    flag_values: flags.FlagValues = copy.deepcopy(module.FLAGS)
    argv, incomplete = [name], False
    for argument in arguments:
        flag, _, value = argument.partition("=")
        if argument in _ELLIPSES:
            incomplete = True
        elif flag.startswith("--config.") or argument in _HELP:
            argv += [argument] * (argument not in _HELP)
        elif _PLACEHOLDER.fullmatch(value) and flag.removeprefix("--") in flag_values:
            incomplete |= flag == "--config"
        else:
            argv.append(argument)
    overrides, *_ = command.parse(argv, flag_values, getattr(module, "CHOICES", ()))
    if "config" in flag_values and flag_values["config"].value and not incomplete:
        _check_config(flag_values["config"].value, overrides)
    else:
        for override in overrides:
            _check_field(override)


def _check_flag(name: str) -> None:
    """Checks a flag outside any command: that some command has it."""
    flags_of = [importlib.import_module(f"hypjax.{command}").FLAGS for command in names()]
    if name not in _FOREIGN_FLAGS and not any(name in known for known in flags_of):
        raise UserError(f"no command has the flag --{name}")


def _check_config(spec: str, overrides: Sequence[str]) -> None:
    """Loads a configuration with its overrides, without opening data."""
    if _PLACEHOLDER.fullmatch(spec) or _READERS_FILE.fullmatch(spec):
        given = []
    else:
        read_config(spec)
        given = [x for x in overrides if not _is_placeholder(x)]
        if given or not overrides:
            load_config(spec, given)
    for override in overrides:
        if override not in given:
            _check_field(override)


@functools.cache
def _check_field(override: str) -> None:
    """Checks a field outside any command: that it exists and that some configuration takes it."""
    field, _, value = override.partition("=")
    if field.endswith("*") or field.isupper():
        return
    if field not in _fields():
        load_config("configs/glyphs.py", [override])  # Raises the message that users see.
    if not value or _is_placeholder(override):
        return
    refusals = []
    for path in sorted((REPOSITORY / "configs").glob("*.py")):
        path = path.relative_to(REPOSITORY)
        photos = ["data.path=photos"] * (path.stem == "folder")
        try:
            load_config(str(path), [*photos, override])
            return
        except UserError as error:
            refusals.append(error)
    if all(str(error).startswith(f"config.{field} is ") for error in refusals):
        raise refusals[0]  # Else it may be valid next to other fields.


def _is_placeholder(override: str) -> bool:
    return bool(_PLACEHOLDER.fullmatch(override.partition("=")[2]))
