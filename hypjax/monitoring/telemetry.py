"""Writes measurements to metrics.jsonl, TensorBoard, and Weights & Biases."""

import contextlib
import hashlib
import json
import os
import pathlib
import time
from collections.abc import Mapping
from typing import Any

from flax.traverse_util import flatten_dict

from hypjax.errors import explained, require_package
from hypjax.parallel import processes
from hypjax.runs.files import METRICS
from hypjax.system import console
from hypjax.system.files import sync, write_text

Values = Mapping[str, Any]  # Numbers, or nested mappings of numbers.


class Telemetry:
    """Writes measurements to all sinks; a resumed run discards values after its checkpoint."""

    def __init__(
        self, folder: pathlib.Path, first_step: int, project: str | None, fields: Values
    ) -> None:
        """Opens the sinks; with a `project`, Weights & Biases also gets the fields of the run."""
        self._sinks: list[_JsonLines | _EventFiles | _WandbRun] = []
        if processes.is_first():
            folder.mkdir(parents=True, exist_ok=True)
            json_lines = _JsonLines(folder / METRICS, first_step)
            self._sinks = [json_lines, _EventFiles(folder, first_step)]
            if project:
                self._sinks.append(_WandbRun(folder, project, fields))

    def write(self, step: int, values: Values) -> None:
        """Writes the values of a step; a failure is only a warning."""
        for sink in self._sinks:
            with console.tolerating("measurements"):
                sink.write(step, values)

    def close(self) -> None:
        """Closes all sinks."""
        for sink in self._sinks:
            with contextlib.suppress(OSError):
                sink.close()


class _JsonLines:
    """A file with a JSON object per line; opening it removes lines of later steps."""

    def __init__(self, path: pathlib.Path, first_step: int) -> None:
        self._path = path
        kept_lines = ""
        for line in path.read_text(errors="replace").splitlines() if path.exists() else ():
            with contextlib.suppress(ValueError):  # A partial line.
                values = json.loads(line)
                # Test scores of the first step will be written again.
                last_kept_step = first_step - 1 if "test" in values else first_step
                if values["step"] <= last_kept_step:
                    kept_lines += f"{line}\n"
        with console.tolerating(str(path)):
            write_text(path, kept_lines)

    def write(self, step: int, values: Values) -> None:
        """Appends a line; removes a partial line if the disk is full."""
        size_before = self._path.stat().st_size
        try:
            with self._path.open("a") as file:
                file.write(json.dumps({"step": step, **values}) + "\n")
        except OSError:
            os.truncate(self._path, size_before)
            raise

    def close(self) -> None:
        sync(self._path)


class _EventFiles:
    """TensorBoard's event files: a new file for each start and after each failure.

    TensorBoard drops the steps of earlier files from the new file's start event on. tensorboardX's
    SummaryWriter would write in a thread; when a full disk ends it, the loop waits forever.
    """

    def __init__(self, folder: pathlib.Path, first_step: int) -> None:
        # Imported by runs alone, since it imports PyTorch, too, where that is installed.
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event

        self._open, self._event = EventsWriter, Event
        self._folder = folder / "tensorboard"
        self._first_step = first_step + 1 if first_step else 0  # Step 0 is written again.
        self._writer: Any = None  # An `EventsWriter`, from the first values on.

    def write(self, step: int, values: Values) -> None:
        try:
            if self._writer is None:
                self._folder.mkdir(exist_ok=True)
                self._start(f".{os.getpid()}.{step}")
            numbers = [{"tag": n, "simple_value": x} for n, x in _flat(values).items()]
            self._write_event(step, summary={"value": numbers})
        except OSError:
            self._writer, self._first_step = None, step  # The file may end in a partial event.
            raise

    def _start(self, suffix: str) -> None:
        self._writer = self._open(str(self._folder / "events"), suffix)
        self._write_event(self._first_step, session_log={"status": "START"})

    def _write_event(self, step: int, **content: Any) -> None:
        self._writer.write_event(self._event(wall_time=time.time(), step=step, **content))
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def require_wandb(project: str | None) -> None:
    """Checks early that Weights & Biases is installed, if a project is named."""
    if project and processes.is_first():
        require_package("wandb", "config.run.wandb_project", "wandb")


class _WandbRun:
    """A Weights & Biases run, resumed together with ours."""

    def __init__(self, folder: pathlib.Path, project: str, fields: Values) -> None:
        import wandb

        with explained("Weights & Biases cannot be used"):
            self._run = wandb.init(
                project=project,
                dir=folder,
                id=hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16],
                name=folder.name,
                resume="allow",
                config=dict(fields),
                # Metadata would include the command line.
                settings=wandb.Settings(silent=True, x_disable_meta=True),
            )

    def write(self, step: int, values: Values) -> None:
        self._run.log(_flat(values), step=step)

    def close(self) -> None:
        self._run.finish()


def _flat(values: Values) -> dict[str, float]:
    """Flattens values to paths: validation/head/recall@1; train/loss for a top-level loss."""
    flat = flatten_dict(values, sep="/").items()
    return {name if "/" in name else f"train/{name}": float(value) for name, value in flat}
