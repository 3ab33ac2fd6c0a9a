"""Command lines: a command is a function, whose parameters define its flags.

A parameter's annotation says how the flag's value is parsed, its default is the flag's default, and
its entry under Args in the docstring is the help text. Flags without a default are required. A
parameter whose type is a dataclass stands for a group of flags, one per field. The parameter
`overrides` receives --config.FIELD=VALUE as 'FIELD=VALUE'. Positional-only parameters (before a
slash) and *names take words without dashes. --help ends with the Example of the docstring.

It is an error to set a flag in vain: a description may begin with the condition 'With
--encoder=onnx: ' or 'Without --encoder: ', or with words that go with the flag: 'disk, grid: '.
"""

import argparse
import collections
import contextlib
import dataclasses
import faulthandler
import functools
import inspect
import io
import os
import pathlib
import re
import signal
import sys
import typing
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, NoReturn

from hypjax import errors
from hypjax.catalogue import Engine
from hypjax.fields import ANY, Rule, at_least, one_of
from hypjax.system import console, exits, machine

_OVERRIDE = "--config."
# The condition under which a flag has an effect, at the start of its description.
_CONDITION = re.compile(r"(?:(With|Without) --(\w+)(?:=([\w-]+))?|([a-z]+(?:, [a-z]+)*)): ")
_BOOLEANS = {"true": True, "1": True, "false": False, "0": False}
_REQUIREMENTS = {int: "a whole number", float: "a number", bool: "true or false"}


def ends_in(*suffixes: str) -> Rule:
    """Rule for the path of a file to write, which must end in one of the suffixes."""
    words = f"a file that ends in {', '.join(suffixes)}"
    return Rule(lambda path: path.suffix in suffixes and not path.is_dir(), words)


Positive = Annotated[int, at_least(1)]
Natural = Annotated[int, at_least(0)]
NonNegative = Annotated[float, at_least(0)]
Figure = Annotated[pathlib.Path, ends_in(".png", ".pdf", ".svg", ".jpg")]
Numbers = Annotated[pathlib.Path, ends_in(".json")]


@dataclasses.dataclass(frozen=True)
class EncoderFlags:
    """The flags of an encoder without a run, and of the preprocessing for an ONNX file.

    Args:
        encoder: A pretrained encoder: lite, dinov2, or timm's name of weights; or another
            library's: timm:NAME; hf:NAME, from the Hugging Face hub or a folder; or onnx:FILE.
        mean: With --encoder=onnx: mean of each channel, of pixels scaled to [0, 1].
        std: With --encoder=onnx: standard deviation of each channel.
        resize: With --encoder=onnx: shorter side before the centre crop. Default: the crop's side.
    """

    encoder: str | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    resize: Positive | None = None

    def open(
        self,
        run: str | None = None,
        embedding: str = "head",
        batch_size: int | None = None,
        space: Any = None,
        tokenizer: str | None = None,
        engine: Engine = "auto",
    ) -> Any:
        """Opens an `ImageEmbedder`: the run, or the encoder, whose points are in the space."""
        require_one(workdir=run, encoder=self.encoder)
        from hypjax.inference.image_embedder import open_encoder
        from hypjax.inference.model import EncoderModel, load
        from hypjax.inference.pretrained import is_encoder

        if run:
            return load(run, embedding, batch_size, tokenizer=tokenizer, engine=engine)
        spec = self.encoder or ""
        if is_encoder(spec):
            return EncoderModel(spec, space, batch_size, engine=engine)
        if engine != "auto":
            raise errors.UserError(f"--engine has no effect on {spec}; leave it out")
        pixels = {k: x for k, x in vars(self).items() if k != "encoder" and x is not None}
        return open_encoder(spec, space, batch_size, **pixels)


def run(main: Callable[..., None], *, resumes: bool = False) -> None:
    """Calls `main` with the command line's arguments; ends the process on an error.

    `resumes` means that the command, run again after an interrupt, continues; a message says so.
    """
    warnings.showwarning = _show_warning
    machine.keep_freed_memory()
    with contextlib.suppress(io.UnsupportedOperation):  # In a notebook, stderr is no file.
        faulthandler.enable()
    for signum in exits.STATUS_OF_SIGNAL:
        signal.signal(signum, functools.partial(_end, resumes))
    with exits.failing_at_once(), errors.reported():
        bound = parse(main, sys.argv)
        main(*bound.args, **bound.kwargs)


class _Parser(argparse.ArgumentParser):
    """Parser of a command's flags and words; what is left out has no entry in the result."""

    def __init__(self, main: Callable[..., None]) -> None:
        super().__init__(
            usage=argparse.SUPPRESS,
            description=sys.modules[main.__module__].__doc__,
            epilog=f"example:\n  {' '.join(_sections(main)['Example'].split())}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        for name, (parameter, description) in flags_of(main).items():
            self._add(name, parameter, description)

    def _add(self, name: str, parameter: inspect.Parameter, description: str) -> None:
        """Adds the flag or the words of a parameter."""
        kind, rule, choices, repeated = parameter.annotation, ANY, (), None
        while (origin := typing.get_origin(kind)) is not None:
            kind, *others = arguments = typing.get_args(kind)  # Of X | None: X.
            if origin in (list, tuple):
                repeated = origin  # list: of a flag; tuple: of values separated by commas.
            elif origin is Annotated:
                (rule,) = others
            elif origin is Literal:
                kind, rule, choices = str, one_of(*arguments), arguments
        takes_many = parameter.kind is parameter.VAR_POSITIONAL
        takes_words = takes_many or parameter.kind is parameter.POSITIONAL_ONLY
        default = () if takes_many else parameter.default
        shown = ",".join(default) if isinstance(default, tuple) else str(default)
        note = "" if shown in ("None", "False", "") else f" (default: {shown})"
        note = " (required)" if default is parameter.empty else note
        value = name if takes_words else "[true|false]" if kind is bool else kind.__name__.upper()
        or_several = ", or several, separated by commas" * (repeated is tuple)
        one = functools.partial(_parse_value, kind, rule, choices, or_several)
        self.add_argument(
            name if takes_words else f"--{name}",
            action="append" if repeated is list else "store",
            type=(lambda text: [one(x) for x in re.split(", *", text) if x]) if or_several else one,
            nargs="*" if takes_many else "?" if takes_words else None,
            default=default if takes_words else argparse.SUPPRESS,
            metavar="|".join(choices) or value + ",..." * (repeated is tuple),
            help=(description + note).replace("%", "%%"),
        )

    def error(self, message: str) -> NoReturn:
        """Raises a `UserError` instead of printing the usage."""
        problem = re.sub(r"^argument (--\w+)?[^:]*: ", lambda x: f"{x[1] or 'the word'} ", message)
        raise errors.UserError(problem if "must be" in problem else f"{problem} (see --help)")


def _parse_value(kind: type, rule: Rule, choices: Sequence[str], or_several: str, text: str) -> Any:
    """Parses a flag's value; argparse reports the error after the flag's name."""
    try:
        value: Any = _BOOLEANS[text.lower()] if kind is bool else kind(text)
        value = value.expanduser() if kind is pathlib.Path else value
        if rule.holds(value):
            return value
        requirement = rule.words
    except (KeyError, ValueError):
        requirement = _REQUIREMENTS[kind]
    requirement += or_several + errors.similar(text, choices)
    raise argparse.ArgumentTypeError(f"is {text!r}; it must be {requirement}")


def flags_of(function: Callable[..., Any]) -> dict[str, tuple[inspect.Parameter, str]]:
    """Flags and words of a command: parameters and descriptions by name; `print_` is --print."""
    texts = dict(re.findall(r"(?m)^ {4}\*?(\w+): (.*(?:\n {8}.*)*)", _sections(function)["Args"]))
    flags: dict[str, tuple[inspect.Parameter, str]] = {}
    for parameter in inspect.signature(function, eval_str=True).parameters.values():
        group: Any = parameter.annotation
        if isinstance(group, type) and dataclasses.is_dataclass(group):
            flags |= flags_of(group)
        elif parameter.name != "overrides":
            flags[parameter.name.rstrip("_")] = parameter, " ".join(texts[parameter.name].split())
    return flags


def parse(main: Callable[..., None], argv: Sequence[str]) -> inspect.BoundArguments:
    """Parses a command line, whose first word is the program, into the arguments of `main`.

    Raises a `UserError` if a flag is unknown, missing, wrong or without effect.
    """
    flags, signature = flags_of(main), inspect.signature(main, eval_str=True)
    full: dict[str, str] = {}  # What switches are short for.
    for name in (name for name, (parameter, _) in flags.items() if parameter.annotation is bool):
        full |= {f"--{name}": f"--{name}=true", f"--no{name}": f"--{name}=false"}
    overrides = [x.removeprefix(_OVERRIDE) for x in argv[1:] if x.startswith(_OVERRIDE)]
    others = [full.get(x, x) for x in argv[1:] if not x.startswith(_OVERRIDE)]
    namespace, unknown = _Parser(main).parse_known_intermixed_args(others)
    _refuse_unknown(unknown, flags, "overrides" in signature.parameters)
    if "overrides" not in signature.parameters:
        refuse_overrides(overrides)
    elif "workdir" in flags and "config" not in flags:
        # The run has a configuration, of which only the images' place may be another.
        locations = ("data.path=", "data.labels=", "data.captions=")
        refuse_overrides([x for x in overrides if not x.startswith(locations)])
    given = vars(namespace)
    values = {name: given.get(name, parameter.default) for name, (parameter, _) in flags.items()}
    for name, (parameter, description) in flags.items():
        if parameter.default is parameter.empty and parameter.kind is not parameter.VAR_POSITIONAL:
            require_one(**{name: given.get(name)})
        if isinstance(values[name], pathlib.Path):
            require_writable(values[name].parent)
        if name in given:
            _check_effect(name, description, values)
    arguments: dict[str, Any] = {}
    for name, parameter in signature.parameters.items():
        group: Any = parameter.annotation
        if dataclasses.is_dataclass(group) and isinstance(group, type):
            arguments[name] = group(**{x.name: values[x.name] for x in dataclasses.fields(group)})
        else:
            arguments[name] = overrides if name == "overrides" else values[name.rstrip("_")]
    return inspect.BoundArguments(signature, collections.OrderedDict(arguments))


def require_one(**values: Any) -> None:
    """Requires that exactly one of these flags is set; pass them as NAME=value."""
    flag_names = [f"--{name}" for name in values]
    if not any(values.values()):
        raise errors.UserError(f"{' or '.join(flag_names)} is missing (see --help)")
    if sum(map(bool, values.values())) > 1:
        raise errors.UserError(f"{' and '.join(flag_names)} exclude each other; give only one")


def require_writable(folder: pathlib.Path) -> None:
    """Requires a folder that exists and in which files can be written."""
    if not folder.is_dir():
        raise errors.UserError(f"there is no folder {folder}; create it, or choose another one")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise errors.UserError(f"files in {folder} cannot be written; choose another folder")


def refuse_overrides(overrides: Sequence[str]) -> None:
    """Rejects --config.FIELD=VALUE where no configuration is read."""
    if overrides:
        raise errors.UserError(f"this command takes no configuration: --config.{overrides[0]}")


def write_numbers(path: pathlib.Path, value: Any, *figures: pathlib.Path) -> None:
    """Writes numbers as JSON; prints the file's path after the paths of the figures."""
    from hypjax.system.files import write_json

    with errors.writing(path):
        write_json(path, value)
    console.say(f"wrote {', '.join(map(str, [*figures, path]))}")


def _sections(function: Callable[..., Any]) -> dict[str, str]:
    """The sections of a docstring, such as Args, by their titles."""
    parts = re.split(r"^(\w+):\n", inspect.getdoc(function) or "", flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def _check_effect(flag: str, description: str, values: Mapping[str, Any]) -> None:
    """Rejects a flag if the condition at the start of its description does not hold."""
    if not (condition := _CONDITION.match(description)):
        return
    relation, other_flag, prefix, choices = condition.groups()
    if relation:
        is_set = bool(values[other_flag]) and str(values[other_flag]).startswith(prefix or "")
        holds = is_set == (relation == "With")
        other = f"--{other_flag}={prefix}" if prefix else f"--{other_flag}"
        problem = f"{'with' if is_set else 'without'} {other}"
    else:
        word = next(iter(values.values()))  # The positional argument comes first.
        holds = word in ("all", *choices.split(", "))
        problem = f"on {word}, only on {choices}"
    if not holds:
        raise errors.UserError(f"--{flag} has no effect {problem}; leave it out")


def _refuse_unknown(arguments: Sequence[str], flags: Mapping[str, Any], has_fields: bool) -> None:
    for name in (argument.partition("=")[0] for argument in arguments):
        if not name.startswith("-"):
            raise errors.UserError(f"unexpected argument {name!r}; flags are --NAME=VALUE")
        hint = errors.similar(name, [f"--{flag}" for flag in flags]) + " (--help lists the flags)"
        hint = f"; fields are set by {_OVERRIDE}FIELD=VALUE" if "." in name else hint
        if has_fields:
            from hypjax.config import default_config, flatten

            names = (x for x in flatten(default_config()) if x.split(".")[-1] == name[2:])
            hint = next((f"; set {_OVERRIDE}{field}=VALUE" for field in names), hint)
        raise errors.UserError(f"unknown flag {name}{hint}")


def _end(resumes: bool, signum: int, _frame: object) -> None:
    """Exits immediately on a signal; training replaces this handler to save its state first."""
    # As an exception, an interrupt could be lost in a callback, or crash threads at exit.
    next_time = "; the same command resumes from what is saved" if resumes else ""
    os.write(2, f"\ninterrupted{next_time}\n".encode())
    exits.at_once(exits.STATUS_OF_SIGNAL[signal.Signals(signum)])


def _show_warning(message: Warning | str, *args: object, **kwargs: object) -> None:
    """Prints a warning on one line, without its location in the code."""
    print(f"warning: {errors.on_one_line(errors.redacted(str(message)))}", file=sys.stderr)
