"""The frame of all commands: parses flags, calls one function, reports errors in one sentence.

A command module defines its flags in its own `FLAGS = Flags(...)`, so that one process can import
several commands. They join absl's global flags only when the module runs as a command.
"""

import functools
import os
import pathlib
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from absl import app, flags, logging

from hypjax import errors
from hypjax.system import console, exits, machine

_OVERRIDE = "--config."
FIGURES = (".png", ".pdf", ".svg", ".jpg")


flags.disclaim_key_flags()  # A flag belongs to the module that creates its `Flags`.

# Defines a flag, whose name is the second argument.
_Definition = Callable[["Flags", str], object]


class _Numbers(flags.ListParser):
    def __init__(self, kind: type) -> None:
        super().__init__()
        self._kind = kind

    def parse(self, argument: str | list[Any]) -> list[Any]:
        return list(map(self._kind, super().parse(argument)))


def _kind(define: Callable[..., Any], default: Any = None, **bounds: Any) -> Callable[..., Any]:
    """Makes a kind of flag, a function of help and default, from absl's `define`."""

    def flag(description: str, default: Any = default, **options: Any) -> _Definition:
        options |= bounds
        return lambda flag_values, name: define(
            name=name, default=default, help=description, flag_values=flag_values, **options
        )

    return flag


string = _kind(flags.DEFINE_string)
strings = _kind(flags.DEFINE_multi_string, [])  # A flag that may be repeated.
words = _kind(flags.DEFINE_list, [])  # Separated by commas.
integer = _kind(flags.DEFINE_integer)
positive = _kind(flags.DEFINE_integer, lower_bound=1)
natural = _kind(flags.DEFINE_integer, lower_bound=0)
integers = _kind(flags.DEFINE_multi_integer, [])
number = _kind(flags.DEFINE_float)
boolean = _kind(flags.DEFINE_boolean, False)
enum = _kind(flags.DEFINE_enum)  # One of its `enum_values`.
numbers = _kind(functools.partial(flags.DEFINE, _Numbers(float)))  # Separated by commas.
integer_list = _kind(functools.partial(flags.DEFINE, _Numbers(int)))

# Flags that several commands have.
RUN = string("Folder of a trained run, or its URL.")
RUNS = strings(
    "Folder of a trained run, or its URL; repeat the flag to compare runs of one dataset."
)
DATA_DIR = string("Folder of prepared datasets. Default: ~/tensorflow_datasets.")
CHOSEN = {
    "images": integer(
        "Largest number of test images; of more, random classes are chosen. Memory and time grow "
        "with its square.",
        5000,
        lower_bound=3,
    ),
    "seed": natural("Seed of the choice of images.", 0),
}
# --encoder, and how pixels reach one in an ONNX file; see `Flags.open_embedder`.
ENCODER = {
    "encoder": string(
        "Encoder of another library: timm:NAME, with the weights of a file as timm:NAME@FILE; "
        "hf:NAME, of the Hugging Face hub or a folder; or onnx:FILE."
    ),
    "mean": numbers("onnx: mean of each channel, of pixels scaled to [0, 1]."),
    "std": numbers("onnx: standard deviation of each channel."),
    "resize": positive(
        "onnx: shorter side before the centre is cropped. Default: the side of the crop."
    ),
}


class Flags(flags.FlagValues):
    """The flags of one command; once they are parsed, attributes are their values.

    With `overrides`, the command takes --config.FIELD=VALUE.
    """

    def __init__(self, *, overrides: bool = False, **definitions: _Definition) -> None:
        super().__init__()
        self.__dict__["overrides"] = overrides  # As an attribute it would be a flag.
        for name, define in definitions.items():
            define(self, name)

    def require(self, *names: str) -> None:
        """Raises an error if a required flag is missing."""
        for name in names:
            if not self[name].value:
                raise errors.UserError(f"--{name} is missing (--help describes it)")

    def require_one(self, *names: str) -> None:
        """Raises an error unless exactly one of some flags is set."""
        count, dashed = sum(bool(self[name].value) for name in names), [f"--{x}" for x in names]
        if not count:
            raise errors.UserError(f"{' or '.join(dashed)} is missing (--help describes them)")
        if count > 1:
            raise errors.UserError(f"{' and '.join(dashed)} exclude each other; give one of them")

    def output_file(self, name: str, *suffixes: str) -> pathlib.Path | None:
        """Returns the file that a flag names, if any; raises an error if it cannot be written."""
        if not self[name].value:
            return None
        path = pathlib.Path(self[name].value).expanduser()
        if path.suffix not in suffixes or path.is_dir():
            raise errors.UserError(
                f"--{name} is {path}; it must be a file whose name ends in {', '.join(suffixes)}"
            )
        require_writable(path.parent)
        return path

    def open_embedder(self, space: Any = None, batch_size: int | None = None) -> Any:
        """Opens the run of --workdir, or the encoder of `ENCODER`, as an `ImageEmbedder`."""
        if "workdir" in self and self.workdir:
            from hypjax.inference.model import Model

            return Model(self.workdir, self.embedding, batch_size)
        from hypjax.inference.external_embedder import open_encoder

        pixels = {name: self[name].value for name in ("mean", "std", "resize")}
        return open_encoder(self.encoder, space, batch_size, **pixels)


def run(
    main: Callable[..., None],
    flag_values: Flags,
    example: str,
    choices: Sequence[str] | None = (),
    *,
    resumes: bool = False,
) -> None:
    """Parses the command line, calls `main` with the result of `parse`, and ends the process.

    --help ends with the example, a command line that works after those of the README. With
    `resumes`, the command saves its progress, and continues there when it is run again.
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

    These are its overrides, if it takes any, with `--config.FIELD=VALUE` as 'FIELD=VALUE'; and its
    positional argument, one of the `choices`, or None. If `choices` is None, any number of
    positional arguments is allowed.
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
    arguments, positional = [overrides] * flag_values.overrides, rest[1:]
    if choices is None:
        return [*arguments, positional]
    if len(positional) > bool(choices):
        raise errors.UserError(
            f"unexpected argument {positional[-1]!r}; flags are written --NAME=VALUE"
        )
    if positional and positional[0] not in choices:
        raise errors.UserError(f"{positional[0]!r} is not one of {', '.join(choices)}")
    return [*arguments, *(positional or [None])] if choices else arguments


def require_writable(folder: pathlib.Path) -> None:
    """Raises an error if files of a folder cannot be written."""
    if not folder.is_dir():
        raise errors.UserError(f"there is no folder {folder}; create it, or choose another one")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise errors.UserError(f"files in {folder} cannot be written; choose another folder")


def write_numbers(path: pathlib.Path, value: Any, *figures: pathlib.Path) -> None:
    """Writes numbers as JSON, and prints the paths of these and of the figures beside them."""
    from hypjax.system.files import write_json

    with errors.writing(path):
        write_json(path, value)
    console.say(f"wrote {', '.join(map(str, [*figures, path]))}")


def refuse_overrides(overrides: Sequence[str]) -> None:
    """Raises an error if fields of a configuration are set for a command without one."""
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
