"""Writes measurements: to metrics.jsonl, TensorBoard, and Weights & Biases."""

import contextlib
import errno
import hashlib
import importlib.util
import json
import os
import pathlib
import time
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

from ml_collections import ConfigDict
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto import event_pb2
from tensorboardX.proto.summary_pb2 import Summary

from hypjax.config import for_files
from hypjax.errors import UserError
from hypjax.parallel import processes
from hypjax.system import console
from hypjax.system.files import flush, write_text

Values = Mapping[str, Any]  # Numbers, or nested mappings of numbers.

_TENSORBOARD = "tensorboard"


class Telemetry:
    """Writes measurements to all sinks, and retries later what a sink cannot write now.

    A sink writes the values of a step completely, or raises an `OSError` and writes nothing.
    """

    def __init__(self, folder: pathlib.Path, first_step: int, config: ConfigDict) -> None:
        """Resumes a run's measurements; those written after its last checkpoint are removed."""
        self._sinks: list[JsonLines | EventFiles | WandbRun] = []
        if processes.is_first():
            self._sinks += [
                JsonLines(folder / "metrics.jsonl", first_step),
                EventFiles(folder / _TENSORBOARD, first_step),
            ]
            if config.run.wandb_project:
                self._sinks.append(WandbRun(folder, config))
        self._pending: list[list[tuple[int, Values]]] = [[] for _ in self._sinks]

    def write(self, step: int, values: Values) -> None:
        """Writes the values of a step, after those that could not be written before."""
        for sink, pending in zip(self._sinks, self._pending, strict=True):
            failed_before = bool(pending)
            pending.append((step, values))
            try:
                while pending:
                    sink.write(*pending[0])
                    pending.pop(0)
            except OSError as error:
                if not failed_before:
                    console.warn(
                        f"measurements could not be written ({error.strerror}); "
                        "they are kept and written with the next ones"
                    )

    def close(self) -> None:
        """Closes all sinks."""
        for sink in self._sinks:
            with contextlib.suppress(OSError):
                sink.close()


class JsonLines:
    """A file with one JSON object per line."""

    def __init__(self, path: pathlib.Path, first_step: int) -> None:
        """Removes lines written after the given step, including a partial last line."""
        self._path = path
        self._file: BinaryIO | None = None
        with console.tolerating(str(path)):
            if path.exists():
                lines = path.read_text(errors="replace").splitlines()
                kept = [line + "\n" for line in lines if _precedes(line, first_step)]
                write_text(path, "".join(kept))

    def write(self, step: int, values: Values) -> None:
        """Appends a line; if the disk is full, a partial line is removed again."""
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("ab", buffering=0)
        end = os.fstat(self._file.fileno()).st_size
        line = (json.dumps({"step": step, **values}) + "\n").encode()
        try:
            if self._file.write(line) < len(line):
                raise OSError(errno.ENOSPC, "No space left on device")
        except OSError:
            self._file.truncate(end)
            raise

    def close(self) -> None:
        """Closes the file, once all lines are on the disk."""
        if self._file is not None:
            flush(self._file)
            self._file.close()


def _precedes(line: str, first_step: int) -> bool:
    """Whether a line was written before the checkpoint of the given step was saved.

    Scores on the test classes are written before the first step and after the last save.
    """
    try:
        values = json.loads(line)
        return values["step"] < first_step + ("test" not in values)
    except (ValueError, KeyError):  # A partial line.
        return False


class EventFiles:
    """TensorBoard's event files: a new one for each start and after each failure.

    tensorboardX's own SummaryWriter writes in a thread. When a full disk ends that thread, nobody
    is told, its queue fills, and the loop waits for it forever.
    """

    def __init__(self, folder: pathlib.Path, first_step: int) -> None:
        """Prepares to write; TensorBoard discards steps of earlier files from the first one on."""
        self._folder, self._first_step = folder, first_step
        self._writer: EventsWriter | None = None
        self._files, self._started = 0, False

    def write(self, step: int, values: Values) -> None:
        """Writes each number under a name like validation/head/recall@1."""
        try:
            if self._writer is None:
                self._begin()
            numbers = [Summary.Value(tag=name, simple_value=n) for name, n in _flat(values)]
            self._event(step, summary=Summary(value=numbers))
        except OSError:
            self._writer = None  # The file may end in a partial event.
            raise

    def _begin(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._files += 1
        suffix = f".{os.getpid()}.{self._files}"
        self._writer = EventsWriter(str(self._folder / "events"), suffix)
        if not self._started:
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            # Step 0 is written again.
            self._event(self._first_step and self._first_step + 1, session_log=start)
            self._started = True

    def _event(self, step: int, **content: Any) -> None:
        self._writer.write_event(event_pb2.Event(wall_time=time.time(), step=step, **content))
        self._writer.flush()

    def close(self) -> None:
        """Closes the file."""
        if self._writer is not None:
            self._writer.close()


def require_wandb(config: ConfigDict) -> None:
    """Checks early that Weights & Biases is installed, if it is requested."""
    wanted = config.run.wandb_project and processes.is_first()
    if wanted and importlib.util.find_spec("wandb") is None:
        raise UserError(
            "config.run.wandb_project is set, but wandb is not installed: pip install wandb"
        )


class WandbRun:
    """A Weights & Biases run, resumed together with ours."""

    def __init__(self, folder: pathlib.Path, config: ConfigDict) -> None:
        import wandb

        try:
            self._run = wandb.init(
                project=config.run.wandb_project,
                dir=folder,
                id=hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16],
                name=folder.name,
                resume="allow",
                config=for_files(config),
                settings=wandb.Settings(silent=True, x_disable_meta=True),  # The command line.
            )
        except wandb.Error as error:
            raise UserError(f"Weights & Biases cannot be used: {error}") from error

    def write(self, step: int, values: Values) -> None:
        """Logs the numbers of a step."""
        self._run.log(dict(_flat(values)), step=step)

    def close(self) -> None:
        """Sends the rest."""
        self._run.finish()


def _flat(values: Values, prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yields numbers with their path; those at the top level belong to training."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}/")
        else:
            yield (prefix or "train/") + name, float(value)
