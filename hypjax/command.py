"""The frame of all commands: a command is a function, and its parameters are the flags.

A parameter's annotation selects its flag's parser, its default is the flag's, and its entry under
Args in the docstring is the help. A parameter without a default must be set on the command line;
`overrides` takes --config.FIELD=VALUE as 'FIELD=VALUE'. Positional-only parameters (before a slash)
and *names are no flags. --help ends with the docstring's Example, which follows on the README's.

A description that begins with a condition, 'With --encoder=onnx: ', 'Without --merge: ' or, of the
positional argument, 'hits: ', makes it an error to set the flag where the condition does not hold.
"""

import dataclasses
import functools
import inspect
import os
import pathlib
import re
import signal
import sys
import types
import typing
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any

from absl import app, flags, logging

from hypjax import errors
from hypjax.system import console, exits, integrations, machine

_OVERRIDE = "--config."
# What a flag needs to have an effect: another flag, its absence, or a positional argument.
_CONDITION = re.compile(r"(?:(With|Without) --(\w+)(?:=([\w-]+))?|([a-z]+(?:, [a-z]+)*)): ")


class OutputFile(flags.ArgumentParser):
    """Parses a file to write, whose name ends in one of the suffixes."""

    def __init__(self, *suffixes: str) -> None:
        self.suffixes = suffixes

    def parse(self, argument: str) -> pathlib.Path | None:
        """Returns the path; whether it can be written is checked when all flags are parsed."""
        return pathlib.Path(argument).expanduser() if argument else None


class _ListOf(flags.ListParser):
    def __init__(self, value: flags.ArgumentParser) -> None:
        super().__init__()
        self._value = value
        if value.syntactic_help:
            self.syntactic_help = f"{value.syntactic_help}, or several, separated by commas"

    def parse(self, argument: str | Sequence[Any]) -> list[Any]:
        """Returns the values; a default is parsed already."""
        values = super().parse(argument) if isinstance(argument, str) else argument
        return [self._value.parse(value) for value in values]


class Engine(flags.ArgumentParser):
    """Parses a format or a location of embeddings; --help lists other programs' formats."""

    def __init__(self, ability: integrations.Ability) -> None:
        self.syntactic_help = f"formats: {', '.join(integrations.names(ability))}"


Positive = Annotated[int, flags.IntegerParser(1)]
Natural = Annotated[int, flags.IntegerParser(0)]
NonNegative = Annotated[float, flags.FloatParser(0)]
FIGURES = (".png", ".pdf", ".svg", ".jpg")
Figure = Annotated[pathlib.Path, OutputFile(*FIGURES)]
# The kinds of parameters that are flags; others are positional.
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_PARSERS = {str: flags.ArgumentParser, int: flags.IntegerParser, float: flags.FloatParser}


@dataclasses.dataclass(frozen=True)
class ExternalEncoder:
    """The flags of an encoder of another library, and of how pixels reach one in an ONNX file.

    Args:
        encoder: Encoder of another library: timm:NAME, with the weights of a file as
            timm:NAME@FILE; hf:NAME, of the Hugging Face hub or a folder; or onnx:FILE.
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
    ) -> Any:
        """Opens a run, or else the encoder with its space, as an `ImageEmbedder`."""
        require_one(workdir=run, encoder=self.encoder)
        if run:
            from hypjax.inference.model import Model

            return Model(run, embedding, batch_size)
        from hypjax.inference.external_embedder import open_encoder

        pixels = {name: x for name, x in vars(self).items() if name != "encoder" and x is not None}
        return open_encoder(self.encoder, space, batch_size, **pixels)


def run(main: Callable[..., None], *, resumes: bool = False) -> None:
    """Parses the command line, calls `main` with its values, and ends the process.

    With `resumes`, the command saves its progress, and continues there when it is run again.
    """
    warnings.showwarning = _show_warning
    machine.keep_freed_memory()
    for number in exits.ENDING:
        signal.signal(number, functools.partial(_end, resumes))
    flag_values = flags_of(main)
    # From absl's global flags, --help and --helpfull are printed.
    flags.FLAGS.append_flag_values(flag_values)
    for name in flag_values:
        flags.FLAGS.register_flag_by_module(sys.argv[0], flag_values[name])

    def parsed(argv: Sequence[str]) -> inspect.BoundArguments:
        try:
            arguments = parse(main, argv, flag_values)
        except SystemExit:  # After printing help, which absl counts as a failure.
            if choice := _choice(inspect.signature(main, eval_str=True)):
                choices = "|".join(typing.get_args(choice.annotation))
                print(f"\nfirst argument: {choices} (default: {choice.default})")
            print(f"\nexample:\n  {' '.join(_sections(main)['Example'].split())}")
            sys.exit(0)
        flags.FLAGS.mark_as_parsed()  # Checked by absl, and by Grain in its worker processes.
        if not flags.FLAGS["verbosity"].present:
            logging.set_verbosity(logging.WARNING)  # Orbax logs every file that it writes.
        return arguments

    with exits.failing_at_once(), errors.reported():
        app.run(lambda bound: main(*bound.args, **bound.kwargs), flags_parser=parsed)


def flags_of(main: Callable[..., None]) -> flags.FlagValues:
    """Defines the flags of a command."""
    flag_values = flags.FlagValues()
    for parameter, description in _flag_parameters(main):
        kind, default = _kind(parameter), parameter.default
        if default is parameter.empty:
            default, description = None, f"{description} (required)"
        options = dict(name=_flag(parameter), default=default, help=description)
        if kind is bool:
            flags.DEFINE_boolean(flag_values=flag_values, **options)
        elif typing.get_origin(kind) is typing.Literal:
            flags.DEFINE_enum(enum_values=typing.get_args(kind), flag_values=flag_values, **options)
        elif typing.get_origin(kind) is list:  # A flag that may be repeated.
            (item,) = typing.get_args(kind)
            serializer = flags.ArgumentSerializer()
            flags.DEFINE_multi(_parser(item), serializer, flag_values=flag_values, **options)
            flag_values[_flag(parameter)].help = description  # absl appends to it.
        else:
            serializer = flags.ListSerializer(",") if isinstance(default, tuple) else None
            flags.DEFINE(_parser(kind), flag_values=flag_values, serializer=serializer, **options)
    return flag_values


def parse(
    main: Callable[..., None], argv: Sequence[str], flag_values: flags.FlagValues | None = None
) -> inspect.BoundArguments:
    """Parses a command line, whose first word is the program, into the arguments of `main`."""
    flag_values = flag_values or flags_of(main)
    for flag in (flags.FLAGS[name] for name in flags.FLAGS):
        if flag.name not in flag_values:
            flag_values[flag.name] = flag
    argv = ["--help" if arg == "-h" else arg for arg in argv]
    overrides = [arg.removeprefix(_OVERRIDE) for arg in argv if arg.startswith(_OVERRIDE)]
    try:
        positional = flag_values([arg for arg in argv if not arg.startswith(_OVERRIDE)])[1:]
    except (flags.Error, ValueError) as error:
        known = [_flag(parameter) for parameter, _ in _flag_parameters(main)]
        raise errors.UserError(_explanation(error, flag_values, known)) from error
    signature = inspect.signature(main, eval_str=True)
    if "overrides" not in signature.parameters:
        refuse_overrides(overrides)
    _check_positional(signature, positional)
    values = {name: flag_values[name].value for name in flag_values}
    choice = _choice(signature)
    kind = choice and (positional[0] if positional else choice.default)
    for parameter, description in _flag_parameters(main):
        _check(parameter, values[_flag(parameter)])
        if flag_values[_flag(parameter)].present:
            _check_effect(_flag(parameter), description, values, kind)
    arguments = {}
    for name, parameter in signature.parameters.items():
        if name == "overrides":
            arguments[name] = overrides
        elif dataclasses.is_dataclass(group := parameter.annotation):
            arguments[name] = group(**{x.name: values[x.name] for x in dataclasses.fields(group)})
        elif parameter.kind in _NAMED:
            arguments[name] = values[_flag(parameter)]
    return signature.bind(*positional, **arguments)


def require(**values: Any) -> None:
    """Raises an error if a flag is missing."""
    for name, value in values.items():
        require_one(**{name: value})


def require_one(**values: Any) -> None:
    """Raises an error unless exactly one of some flags is set."""
    count, dashed = sum(map(bool, values.values())), [f"--{name}" for name in values]
    if count == 0:
        raise errors.UserError(f"{' or '.join(dashed)} is missing (see --help)")
    if count > 1:
        raise errors.UserError(f"{' and '.join(dashed)} exclude each other; give one of them")


def require_output_file(flag: str, path: pathlib.Path, *suffixes: str) -> None:
    """Raises an error if the file that a flag names cannot be written."""
    if path.suffix not in suffixes or path.is_dir():
        endings = ", ".join(suffixes)
        raise errors.UserError(f"--{flag} is {path}; it must be a file that ends in {endings}")
    require_writable(path.parent)


def require_writable(folder: pathlib.Path) -> None:
    """Raises an error unless a folder exists in which files can be written."""
    if not folder.is_dir():
        raise errors.UserError(f"there is no folder {folder}; create it, or choose another one")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise errors.UserError(f"files in {folder} cannot be written; choose another folder")


def refuse_overrides(overrides: Sequence[str]) -> None:
    """Raises an error if fields of a configuration are set for a command without one."""
    if overrides:
        raise errors.UserError(f"this command takes no configuration: --config.{overrides[0]}")


def write_numbers(path: pathlib.Path, value: Any, *figures: pathlib.Path) -> None:
    """Writes numbers as JSON, and prints the paths of these and of the figures beside them."""
    from hypjax.system.files import write_json

    with errors.writing(path):
        write_json(path, value)
    console.say(f"wrote {', '.join(map(str, [*figures, path]))}")


def _flag_parameters(function: Callable[..., Any]) -> Iterator[tuple[inspect.Parameter, str]]:
    """Yields the parameters of a command that are flags, and their descriptions."""
    entries = re.findall(r"(?m)^ {4}(\w+): (.*(?:\n {8}.*)*)", _sections(function)["Args"])
    descriptions = {name: " ".join(text.split()) for name, text in entries}
    for parameter in inspect.signature(function, eval_str=True).parameters.values():
        if dataclasses.is_dataclass(parameter.annotation):
            yield from _flag_parameters(parameter.annotation)
        elif parameter.kind in _NAMED and parameter.name != "overrides":
            yield parameter, descriptions[parameter.name]


def _sections(function: Callable[..., Any]) -> dict[str, str]:
    """The sections of a docstring, such as Args, by their titles."""
    parts = re.split(r"^(\w+):\n", inspect.getdoc(function), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def _flag(parameter: inspect.Parameter) -> str:
    """The name of a parameter's flag; `print_` is --print."""
    return parameter.name.rstrip("_")


def _kind(parameter: inspect.Parameter) -> Any:
    """The type of a parameter, without None."""
    optional = typing.get_origin(parameter.annotation) in (types.UnionType, typing.Union)
    return typing.get_args(parameter.annotation)[0] if optional else parameter.annotation


def _parser(kind: Any) -> flags.ArgumentParser:
    if typing.get_origin(kind) is Annotated:
        return kind.__metadata__[0]
    if typing.get_origin(kind) is tuple:
        return _ListOf(_parser(typing.get_args(kind)[0]))
    return _PARSERS[kind]()


def _check(parameter: inspect.Parameter, value: Any) -> None:
    if parameter.default is parameter.empty:
        require(**{_flag(parameter): value})
    (parser,) = getattr(_kind(parameter), "__metadata__", [None])
    if isinstance(parser, OutputFile) and value:
        require_output_file(_flag(parameter), value, *parser.suffixes)


def _check_effect(flag: str, description: str, values: Mapping[str, Any], kind: str | None) -> None:
    """Raises an error unless the condition at the beginning of a flag's description holds."""
    if not (condition := _CONDITION.match(description)):
        return
    relation, other, start, kinds = condition.groups()
    if relation:
        holds = bool(values[other]) and str(values[other]).startswith(start or "")
        if holds != (relation == "With"):
            opposite = "with" if holds else "without"
            other = f"--{other}={start}" if start else f"--{other}"
            raise errors.UserError(f"--{flag} has no effect {opposite} {other}; leave it out")
    elif kind and kind != "all" and kind not in kinds.split(", "):
        raise errors.UserError(f"--{flag} has no effect on {kind}, only on {kinds}; leave it out")


def _explanation(error: Exception, flag_values: flags.FlagValues, known: Sequence[str]) -> str:
    """Says in one sentence why absl does not parse a command line."""
    help_hint = "(--help lists the flags)"
    if isinstance(error, flags.UnrecognizedFlagError):
        if "." in error.flagname:
            return f"unknown flag --{error.flagname}; fields are set by {_OVERRIDE}FIELD=VALUE"
        close = errors.similar(error.flagname, known).replace("mean ", "mean --")
        return f"unknown flag --{error.flagname}{close} {help_hint}"
    if not (illegal := re.match(r"flag --(\w+)=(.*?): ", str(error), re.DOTALL)):
        return f"{str(error).rstrip('.')} {help_hint}"
    name, value = illegal.groups()
    flag = flag_values[name]
    if choices := getattr(flag.parser, "enum_values", None):
        rule = errors.nearest(value, choices)
    else:
        rule = f"; it must be {'true or false' if flag.boolean else flag.parser.syntactic_help}"
    return f"--{name} is {value!r}{rule}"


def _choice(signature: inspect.Signature) -> inspect.Parameter | None:
    return next((x for x in signature.parameters.values() if x.kind is x.POSITIONAL_ONLY), None)


def _check_positional(signature: inspect.Signature, values: Sequence[str]) -> None:
    if any(x.kind is x.VAR_POSITIONAL for x in signature.parameters.values()):
        return
    choice = _choice(signature)
    if len(values) > (choice is not None):
        raise errors.UserError(f"unexpected argument {values[-1]!r}; flags are --NAME=VALUE")
    if values and values[0] not in (choices := typing.get_args(choice.annotation)):
        raise errors.UserError(f"{values[0]!r} is not one of {', '.join(choices)}")


def _end(resumes: bool, signum: int, frame: object) -> None:
    """Exits immediately on a signal; training replaces this handler to save its state first."""
    del frame  # As an exception, an interrupt can be lost in a callback or crash threads at exit.
    next_time = "; the same command resumes from what is saved" if resumes else ""
    os.write(2, f"\ninterrupted{next_time}\n".encode())
    exits.at_once(exits.ENDING[signum])


def _show_warning(message: Warning | str, *args: object, **kwargs: object) -> None:
    """Prints a warning on one line, without its location in the code."""
    print(f"warning: {errors.on_one_line(errors.redacted(str(message)))}", file=sys.stderr)
