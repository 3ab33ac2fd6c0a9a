"""What all commands share: they parse flags, call one function and report errors in one sentence.

A command module defines its flags on its own `FLAGS = Flags()`, so that one process can import
several commands. They join absl's global flags only when the module runs as a command.
"""

import functools
import os
import pathlib
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from absl import app, flags, logging

from hypjax import errors
from hypjax.system import exits, machine

if TYPE_CHECKING:  # It imports JAX.
    from hypjax.inference.external_embedder import ExternalEmbedder

_OVERRIDE = "--config."
_FIGURE_SUFFIXES = (".png", ".pdf", ".svg", ".jpg")


class EncoderFlags(NamedTuple):
    """The flags that name an encoder of another library; see `Flags.encoders`."""

    encoder: flags.FlagHolder[str | None]
    mean: flags.FlagHolder[list[float] | None]
    std: flags.FlagHolder[list[float] | None]
    resize: flags.FlagHolder[int | None]

    def open(self, space: Any = None, batch_size: int | None = None) -> "ExternalEmbedder":
        """Opens the encoder, see `open_encoder`."""
        from hypjax.inference.external_embedder import open_encoder

        pixels = {flag.name: flag.value for flag in (self.mean, self.std, self.resize)}
        return open_encoder(self.encoder.value, space, batch_size, **pixels)


class _Numbers(flags.ListParser):
    """Parses numbers that commas separate."""

    def __init__(self, kind: type) -> None:
        super().__init__()
        self._kind = kind

    def parse(self, argument: str | list[Any]) -> list[Any]:
        return list(map(self._kind, super().parse(argument)))


flags.disclaim_key_flags()  # A flag belongs to the module that calls a method of `Flags`.


def _method(define: Callable[..., Any], default: Any = None, **bounds: int) -> Callable[..., Any]:
    """Returns a function of absl that defines a flag, as a method of `Flags`."""

    def method(own: "Flags", name: str, words: str, default: Any = default, **options: Any) -> Any:
        return define(name, default, words, flag_values=own, **bounds, **options)

    return method


class Flags(flags.FlagValues):
    """The flags of one command: each method defines a flag by its name, help and default.

    A command of which `overrides` is true takes --config.FIELD=VALUE.
    """

    def __init__(self, *, overrides: bool = False) -> None:
        super().__init__()
        self.__dict__["overrides"] = overrides  # As an attribute it would be a flag.

    string = _method(flags.DEFINE_string)
    strings = _method(flags.DEFINE_multi_string, [])  # A flag that may be repeated.
    words = _method(flags.DEFINE_list, [])  # Separated by commas.
    integer = _method(flags.DEFINE_integer)
    positive = _method(flags.DEFINE_integer, lower_bound=1)
    natural = _method(flags.DEFINE_integer, lower_bound=0)
    integers = _method(flags.DEFINE_multi_integer, [])
    number = _method(flags.DEFINE_float)
    boolean = _method(flags.DEFINE_boolean, False)

    def enum(self, name: str, choices: list[str], words: str, default: str | None = None) -> Any:
        """Defines a flag that is one of some words."""
        return flags.DEFINE_enum(name, default, choices, words, flag_values=self)

    def numbers(
        self, name: str, words: str, default: list[float] | None = None, kind: type = float
    ) -> flags.FlagHolder[Any]:
        """Defines a flag of numbers, separated by commas."""
        return flags.DEFINE(_Numbers(kind), name, default, words, flag_values=self)

    def runs(self) -> flags.FlagHolder[list[str]]:
        """Defines --workdir, which names runs to compare."""
        words = (
            "Folder of a trained run, or its URL; repeat the flag to compare runs of one dataset."
        )
        return self.strings("workdir", words)

    def encoders(self) -> EncoderFlags:
        """Defines --encoder, and how pixels reach one in an ONNX file."""
        return EncoderFlags(
            self.string(
                "encoder",
                "Encoder of another library: timm:NAME, with the weights of a file as "
                "timm:NAME@FILE; hf:NAME, of the Hugging Face hub or a folder; or onnx:FILE.",
            ),
            self.numbers("mean", "onnx: mean of each channel, of pixels scaled to [0, 1]."),
            self.numbers("std", "onnx: standard deviation of each channel."),
            self.positive(
                "resize",
                "onnx: shorter side before the centre is cropped. Default: the side of the crop.",
            ),
        )


def run(
    main: Callable[..., None],
    flag_values: Flags,
    example: str,
    choices: Sequence[str] | None = (),
    *,
    resumes: bool = False,
) -> None:
    """Parses the command line, calls `main` with the result of `parse`, and ends the process.

    A `UserError` is reported in one sentence, without a traceback. --help ends with the example, a
    command line that works after those of the README. A command `resumes` if it saves what it has
    done, and continues there when it is run again.
    """
    warnings.showwarning = _show_warning
    machine.keep_freed_memory()
    for number in exits.ENDING:
        signal.signal(number, functools.partial(_end, resumes))
    # From absl's global flags, --help and --helpfull are printed.
    flags.FLAGS.append_flag_values(flag_values)
    for module, defined in flag_values.flags_by_module_dict().items():
        for flag in defined:
            flags.FLAGS.register_flag_by_module(module, flag)

    def parsed(argv: Sequence[str]) -> list[Any]:
        try:
            arguments = parse(argv, flag_values, choices)
        except SystemExit:  # After printing help, which absl counts as a failure.
            print(f"\nexample:\n  {example}")
            sys.exit(0)
        flags.FLAGS.mark_as_parsed()  # Checked by absl, and by Grain in its worker processes.
        if not flags.FLAGS["verbosity"].present:
            logging.set_verbosity(logging.WARNING)  # Orbax logs every file that it writes.
        return arguments

    with exits.failing_at_once(), errors.reported():
        app.run(lambda arguments: main(*arguments), flags_parser=parsed)


def parse(argv: Sequence[str], flag_values: Flags, choices: Sequence[str] | None = ()) -> list[Any]:
    """Parses a command line: sets the flags, and returns the arguments of the command's `main`.

    `choices` are words of which one may be given without a flag; None allows any words.

    Returns:
        If the command takes them, the overrides of the configuration, where `--config.FIELD=VALUE`
        becomes 'FIELD=VALUE'; and, if there are choices, the chosen word or None, or the list of
        any words.
    """
    for flag in (flags.FLAGS[name] for name in flags.FLAGS):
        if flag.name not in flag_values:
            flag_values[flag.name] = flag
    overrides = [arg.removeprefix(_OVERRIDE) for arg in argv if arg.startswith(_OVERRIDE)]
    try:
        rest = flag_values([arg for arg in argv if not arg.startswith(_OVERRIDE)])
    except flags.Error as error:
        field = "." in getattr(error, "flagname", "")
        hint = f"fields are set by {_OVERRIDE}FIELD=VALUE" if field else "--help lists the flags"
        raise errors.UserError(f"{str(error).rstrip('.')} ({hint})") from error
    if not flag_values.overrides:
        refuse_overrides(overrides)
    first, words = [overrides] * flag_values.overrides, rest[1:]
    if choices is None:
        return [*first, words]
    if len(words) > bool(choices):
        raise errors.UserError(f"unexpected argument {words[-1]!r}; flags are written --NAME=VALUE")
    if words and words[0] not in choices:
        raise errors.UserError(f"{words[0]!r} is not one of {', '.join(choices)}")
    return [*first, *(words or [None])] if choices else first


def require(*required: flags.FlagHolder[Any]) -> None:
    """Raises an error if a required flag is missing."""
    for flag in required:
        if not flag.value:
            raise errors.UserError(f"--{flag.name} is missing (--help describes it)")


def require_one(*flag_choices: flags.FlagHolder[Any]) -> None:
    """Raises an error unless exactly one of some flags is given."""
    given = [flag for flag in flag_choices if flag.value]
    names = [f"--{flag.name}" for flag in flag_choices]
    if not given:
        raise errors.UserError(f"{' or '.join(names)} is missing (--help describes them)")
    if len(given) > 1:
        raise errors.UserError(f"{' and '.join(names)} exclude each other; give one of them")


def figure(flag: flags.FlagHolder[str | None], *further: str) -> pathlib.Path | None:
    """Returns the file that a flag names for a figure, see `output_file`; None if it names none."""
    return output_file(flag, *_FIGURE_SUFFIXES, *further) if flag.value else None


def output_file(flag: flags.FlagHolder[str | None], *suffixes: str) -> pathlib.Path:
    """Returns the file that a flag names; raises an error if it cannot be written.

    Its name must end in one of the suffixes.
    """
    path = pathlib.Path(flag.value).expanduser()
    if path.suffix not in suffixes or path.is_dir():
        raise errors.UserError(
            f"--{flag.name} is {path}; it must be a file whose name ends in {', '.join(suffixes)}"
        )
    require_writable(path.parent)
    return path


def require_writable(folder: pathlib.Path) -> None:
    """Raises an error if files of a folder cannot be written."""
    if not folder.is_dir():
        raise errors.UserError(f"there is no folder {folder}; create it, or choose another one")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise errors.UserError(f"files in {folder} cannot be written; choose another folder")


def write_numbers(path: pathlib.Path, value: Any, *figures: pathlib.Path) -> None:
    """Writes numbers as JSON, and says so of them and of the figures beside them."""
    from hypjax.system import console
    from hypjax.system.files import write_json

    with errors.writing(path):
        write_json(path, value)
    console.say(f"wrote {', '.join(map(str, [*figures, path]))}")


def refuse_overrides(overrides: Sequence[str]) -> None:
    """Raises an error if a command that takes no configuration was given fields of one."""
    if overrides:
        raise errors.UserError(
            f"this command takes no configuration, but got --config.{overrides[0]}"
        )


def _end(resumes: bool, signum: int, frame: object) -> None:
    """Exits immediately on a signal; training replaces this handler to save its state first.

    Raised as an exception, an interrupt can be lost in a callback or crash threads at exit.
    """
    del frame
    next_time = "; the same command resumes from what is saved" if resumes else ""
    os.write(2, f"\ninterrupted{next_time}\n".encode())
    exits.at_once(exits.ENDING[signum])


def _show_warning(message: Warning | str, *args: object, **kwargs: object) -> None:
    """Prints a warning on one line, without its location in the code."""
    print(f"warning: {errors.on_one_line(errors.redacted(str(message)))}", file=sys.stderr)
