"""Command lines: a command is a function, whose parameters define its flags.

A parameter's annotation selects the flag's parser, its default is the flag's default, and its entry
under Args in the docstring is the help text. Flags without a default are required. A parameter
whose type is a dataclass stands for a group of flags, one per field. The parameter `overrides`
receives --config.FIELD=VALUE as 'FIELD=VALUE'. Positional-only parameters (before a slash) and
*names take words without dashes. --help ends with the Example of the docstring.

A description may begin with a condition: 'With --encoder=onnx: ', 'Without --encoder: ', or values
of the positional argument, such as 'disk, grid: '. Setting the flag is an error if the condition
does not hold.
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
from hypjax.system import console, exits, machine

_OVERRIDE = "--config."
# The condition under which a flag has an effect, at the start of its description.
_CONDITION = re.compile(r"(?:(With|Without) --(\w+)(?:=([\w-]+))?|([a-z]+(?:, [a-z]+)*)): ")


class OutputFile(flags.ArgumentParser):
    """Parses the path of a file to write, which must end in one of the suffixes."""

    def __init__(self, *suffixes: str) -> None:
        self.suffixes = suffixes

    def parse(self, argument: str) -> pathlib.Path | None:
        """Returns the path. Whether it can be written is checked after all flags are parsed."""
        return pathlib.Path(argument).expanduser() if argument else None


class _ListOf(flags.ListParser):
    """Parses values separated by commas, each with another parser."""

    def __init__(self, item_parser: flags.ArgumentParser) -> None:
        super().__init__()
        self._item_parser = item_parser
        if item_parser.syntactic_help:
            self.syntactic_help = f"{item_parser.syntactic_help}, or several, separated by commas"

    def parse(self, argument: str | Sequence[Any]) -> list[Any]:
        """Parses the values; a default comes as a sequence."""
        values = super().parse(argument) if isinstance(argument, str) else argument
        return [self._item_parser.parse(value) for value in values]


Positive = Annotated[int, flags.IntegerParser(1)]
Natural = Annotated[int, flags.IntegerParser(0)]
NonNegative = Annotated[float, flags.FloatParser(0)]
Figure = Annotated[pathlib.Path, OutputFile(".png", ".pdf", ".svg", ".jpg")]
# Kinds of parameters that define flags.
_FLAG_KINDS = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_PARSERS = {str: flags.ArgumentParser, int: flags.IntegerParser, float: flags.FloatParser}


@dataclasses.dataclass(frozen=True)
class ExternalEncoder:
    """The flags of an encoder of another library, and of the preprocessing for an ONNX file.

    Args:
        encoder: Encoder of another library: timm:NAME; hf:NAME, from the Hugging Face hub or a
            folder; or onnx:FILE.
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
        """Opens the run or, without a run, the encoder, as an `ImageEmbedder`.

        `embedding` selects the run's embedding; `space` holds the encoder's points.
        """
        require_one(workdir=run, encoder=self.encoder)
        if run:
            from hypjax.inference.model import Model

            return Model(run, embedding, batch_size)
        from hypjax.inference.image_embedder import open_encoder

        preprocessing = {"mean": self.mean, "std": self.std, "resize": self.resize}
        preprocessing = {name: x for name, x in preprocessing.items() if x is not None}
        return open_encoder(self.encoder, space, batch_size, **preprocessing)


def run(main: Callable[..., None], *, resumes: bool = False) -> None:
    """Parses the command line, calls `main` with the arguments, and ends the process.

    `resumes` means that the command saves its progress, and continues when it is run again; a
    message says so after an interrupt.
    """
    warnings.showwarning = _show_warning
    machine.keep_freed_memory()
    for signum in exits.STATUS_OF_SIGNAL:
        signal.signal(signum, functools.partial(_end, resumes))
    flag_values = flags_of(main)
    # absl prints --help and --helpfull from its global flags.
    flags.FLAGS.append_flag_values(flag_values)
    for name in flag_values:
        flags.FLAGS.register_flag_by_module(sys.argv[0], flag_values[name])

    def parse_flags(argv: Sequence[str]) -> inspect.BoundArguments:
        try:
            arguments = parse(main, argv, flag_values)
        except SystemExit:  # absl printed the help, and exits with an error.
            if positional := _positional(main):
                choices = "|".join(typing.get_args(positional.annotation))
                print(f"\nfirst argument: {choices} (default: {positional.default})")
            print(f"\nexample:\n  {' '.join(_sections(main)['Example'].split())}")
            sys.exit(0)
        flags.FLAGS.mark_as_parsed()  # Checked by absl, and by Grain in its worker processes.
        if not flags.FLAGS["verbosity"].present:
            logging.set_verbosity(logging.WARNING)  # Orbax logs every file that it writes.
        return arguments

    with exits.failing_at_once(), errors.reported():
        app.run(lambda bound: main(*bound.args, **bound.kwargs), flags_parser=parse_flags)


def flags_of(main: Callable[..., None]) -> flags.FlagValues:
    """Defines the flags of a command."""
    flag_values = flags.FlagValues()
    for parameter, description in _flag_parameters(main):
        value_type = parameter.annotation
        if typing.get_origin(value_type) in (types.UnionType, typing.Union):
            value_type = typing.get_args(value_type)[0]  # Of the values other than None.
        options = {"name": _flag(parameter), "flag_values": flag_values}
        options |= {"default": parameter.default, "help": description}
        if parameter.default is parameter.empty:
            options |= {"default": None, "help": f"{description} (required)"}
        if value_type is bool:
            flags.DEFINE_boolean(**options)
        elif typing.get_origin(value_type) is typing.Literal:
            flags.DEFINE_enum(enum_values=typing.get_args(value_type), **options)
        elif typing.get_origin(value_type) is list:  # A flag that may be repeated.
            (item_type,) = typing.get_args(value_type)
            flags.DEFINE_multi(_parser(item_type), flags.ArgumentSerializer(), **options)
            flag_values[_flag(parameter)].help = options["help"]  # absl appends to the help.
        else:
            serializer = flags.ListSerializer(",") if isinstance(parameter.default, tuple) else None
            flags.DEFINE(_parser(value_type), serializer=serializer, **options)
    return flag_values


def parse(
    main: Callable[..., None], argv: Sequence[str], flag_values: flags.FlagValues | None = None
) -> inspect.BoundArguments:
    """Parses a command line, whose first word is the program, into the arguments of `main`.

    Raises:
        UserError: A flag or a word is unknown, missing, has no effect or cannot be parsed, or an
            output file cannot be written.
    """
    flag_values = flag_values or flags_of(main)
    for flag in (flags.FLAGS[name] for name in flags.FLAGS):
        if flag.name not in flag_values:
            flag_values[flag.name] = flag
    argv = ["--help" if arg == "-h" else arg for arg in argv]
    overrides = [arg.removeprefix(_OVERRIDE) for arg in argv if arg.startswith(_OVERRIDE)]
    try:
        words = flag_values([arg for arg in argv if not arg.startswith(_OVERRIDE)])[1:]
    except (flags.Error, ValueError) as error:
        flag_names = [_flag(parameter) for parameter, _ in _flag_parameters(main)]
        raise errors.UserError(_parse_problem(error, flag_values, flag_names)) from error
    signature = inspect.signature(main, eval_str=True)
    if "overrides" not in signature.parameters:
        refuse_overrides(overrides)
    elif "workdir" in signature.parameters and "config" not in signature.parameters:
        # The run has a configuration, of which only the images' place may be another.
        refuse_overrides([x for x in overrides if not x.startswith(("data.path=", "data.labels="))])
    positional = _positional(main)
    _check_words(signature, positional, words)
    values = {name: flag_values[name].value for name in flag_values}
    first_word = words[0] if words else getattr(positional, "default", None)
    for parameter, description in _flag_parameters(main):
        flag = flag_values[_flag(parameter)]
        if parameter.default is parameter.empty:
            require_one(**{flag.name: flag.value})
        if flag.value and isinstance(flag.parser, OutputFile):
            require_output_file(flag.name, flag.value, *flag.parser.suffixes)
        if flag.present:
            _check_effect(flag.name, description, values, first_word)
    arguments = {}
    for name, parameter in signature.parameters.items():
        if name == "overrides":
            arguments[name] = overrides
        elif dataclasses.is_dataclass(group := parameter.annotation):
            arguments[name] = group(**{x.name: values[x.name] for x in dataclasses.fields(group)})
        elif parameter.kind in _FLAG_KINDS:
            arguments[name] = values[_flag(parameter)]
    return signature.bind(*words, **arguments)


def require_one(**values: Any) -> None:
    """Requires that exactly one of these flags is set; pass them as NAME=value."""
    flag_names = [f"--{name}" for name in values]
    num_set = sum(map(bool, values.values()))
    if num_set == 0:
        raise errors.UserError(f"{' or '.join(flag_names)} is missing (see --help)")
    if num_set > 1:
        raise errors.UserError(f"{' and '.join(flag_names)} exclude each other; give only one")


def require_output_file(flag: str, path: pathlib.Path, *suffixes: str) -> None:
    """Requires that the path in a flag ends in one of the suffixes, and can be written."""
    if path.suffix not in suffixes or path.is_dir():
        endings = ", ".join(suffixes)
        raise errors.UserError(f"--{flag} is {path}; it must be a file that ends in {endings}")
    require_writable(path.parent)


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


def _flag_parameters(function: Callable[..., Any]) -> Iterator[tuple[inspect.Parameter, str]]:
    """Yields the parameters of a command that define flags, and their descriptions."""
    texts = dict(re.findall(r"(?m)^ {4}(\w+): (.*(?:\n {8}.*)*)", _sections(function)["Args"]))
    for parameter in inspect.signature(function, eval_str=True).parameters.values():
        if dataclasses.is_dataclass(parameter.annotation):
            yield from _flag_parameters(parameter.annotation)
        elif parameter.kind in _FLAG_KINDS and parameter.name != "overrides":
            yield parameter, " ".join(texts[parameter.name].split())


def _sections(function: Callable[..., Any]) -> dict[str, str]:
    """The sections of a docstring, such as Args, by their titles."""
    parts = re.split(r"^(\w+):\n", inspect.getdoc(function), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def _flag(parameter: inspect.Parameter) -> str:
    """The name of a parameter's flag; `print_` is --print."""
    return parameter.name.rstrip("_")


def _parser(value_type: Any) -> flags.ArgumentParser:
    if typing.get_origin(value_type) is Annotated:
        return value_type.__metadata__[0]
    if typing.get_origin(value_type) is tuple:
        return _ListOf(_parser(typing.get_args(value_type)[0]))
    return _PARSERS[value_type]()


def _check_effect(
    flag: str, description: str, values: Mapping[str, Any], first_word: str | None
) -> None:
    """Rejects a flag if the condition at the start of its description does not hold."""
    if not (condition := _CONDITION.match(description)):
        return
    relation, other_flag, prefix, choices = condition.groups()
    if relation:
        is_set = bool(values[other_flag]) and str(values[other_flag]).startswith(prefix or "")
        if is_set != (relation == "With"):
            opposite = "with" if is_set else "without"
            other = f"--{other_flag}={prefix}" if prefix else f"--{other_flag}"
            raise errors.UserError(f"--{flag} has no effect {opposite} {other}; leave it out")
    elif first_word and first_word != "all" and first_word not in choices.split(", "):
        problem = f"--{flag} has no effect on {first_word}, only on {choices}"
        raise errors.UserError(f"{problem}; leave it out")


def _parse_problem(
    error: Exception, flag_values: flags.FlagValues, flag_names: Sequence[str]
) -> str:
    """Explains in one sentence why absl cannot parse a command line."""
    help_hint = "(--help lists the flags)"
    if isinstance(error, flags.UnrecognizedFlagError):
        if "." in error.flagname:
            return f"unknown flag --{error.flagname}; fields are set by {_OVERRIDE}FIELD=VALUE"
        did_you_mean = errors.similar(error.flagname, flag_names).replace("mean ", "mean --")
        return f"unknown flag --{error.flagname}{did_you_mean} {help_hint}"
    if not (illegal := re.match(r"flag --(\w+)=(.*?): ", str(error), re.DOTALL)):
        return f"{str(error).rstrip('.')} {help_hint}"
    name, value = illegal.groups()
    flag = flag_values[name]
    if choices := getattr(flag.parser, "enum_values", None):
        rule = errors.nearest(value, choices)
    else:
        rule = f"; it must be {'true or false' if flag.boolean else flag.parser.syntactic_help}"
    return f"--{name} is {value!r}{rule}"


def _positional(main: Callable[..., Any]) -> inspect.Parameter | None:
    """The positional-only parameter of a command, which takes one of a few words."""
    parameters = inspect.signature(main, eval_str=True).parameters.values()
    return next((x for x in parameters if x.kind is x.POSITIONAL_ONLY), None)


def _check_words(signature: inspect.Signature, positional: Any, words: Sequence[str]) -> None:
    """Rejects words without dashes that the command does not take."""
    if any(x.kind is x.VAR_POSITIONAL for x in signature.parameters.values()):
        return
    if len(words) > (0 if positional is None else 1):
        raise errors.UserError(f"unexpected argument {words[-1]!r}; flags are --NAME=VALUE")
    if words and words[0] not in (choices := typing.get_args(positional.annotation)):
        raise errors.UserError(f"{words[0]!r} is not one of {', '.join(choices)}")


def _end(resumes: bool, signum: int, _frame: object) -> None:
    """Exits immediately on a signal; training replaces this handler to save its state first."""
    # As an exception, an interrupt could be lost in a callback, or crash threads at exit.
    next_time = "; the same command resumes from what is saved" if resumes else ""
    os.write(2, f"\ninterrupted{next_time}\n".encode())
    exits.at_once(exits.STATUS_OF_SIGNAL[signum])


def _show_warning(message: Warning | str, *args: object, **kwargs: object) -> None:
    """Prints a warning on one line, without its location in the code."""
    print(f"warning: {errors.on_one_line(errors.redacted(str(message)))}", file=sys.stderr)
