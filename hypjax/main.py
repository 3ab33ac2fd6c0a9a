"""Trains and evaluates."""

import dataclasses
import os
import pathlib
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from hypjax import command
from hypjax.errors import UserError
from hypjax.monitoring import stopwatch


@dataclasses.dataclass(frozen=True)
class Processes:
    """The flags of a run in several processes.

    Args:
        coordinator: HOST:PORT of the first of several processes, or auto (Slurm, Open MPI, TPU).
        num_processes: With --coordinator: number of processes, unless that is auto.
        process_id: With --coordinator: index of this process, from 0.
    """

    coordinator: str | None = None
    num_processes: command.Positive | None = None
    process_id: command.Natural | None = None

    def join(self) -> None:
        """Waits for the other processes, if there are any."""
        from hypjax.parallel import processes

        if self.coordinator is not None:
            processes.join(self.coordinator, self.num_processes, self.process_id)


def main(
    *,
    overrides: Sequence[str] = (),
    config: str | None = None,
    workdir: str | None = None,
    name: str | None = None,
    mode: Literal["train", "evaluate"] = "train",
    print_: bool = False,
    dry_run: bool = False,
    output: Annotated[pathlib.Path, command.OutputFile(".json")] | None = None,
    processes: Processes,
    profile: str | None = None,
) -> None:
    """Trains or evaluates a model.

    Args:
        overrides: Fields of the configuration that are set.
        config: Configuration, such as configs/glyphs.py:sph; --config.FIELD=VALUE sets a field.
        workdir: Folder of the run, or its URL in cloud storage. Default: runs/<config>-<variant>,
            followed by the fields that were set, or a hash of them if they are long.
        name: Name of the default folder: --name=birds is short for --workdir=runs/birds.
        mode: Train and then evaluate, or only evaluate the run in --workdir. Without that flag it
            is the run in the default folder or, if model.weights is set, the pretrained model.
        print_: Print all fields, their values and where these come from; then stop.
        dry_run: Run a few steps, print memory and expected time; then stop. Nothing is saved.
        output: With --mode=evaluate: file to write the scores to, such as scores.json.
        processes: The processes of the run.
        profile: With --mode=train: steps to trace for TensorBoard or Perfetto, such as 10:15.

    Example:
        python -m hypjax.main --config=configs/glyphs.py:sph
    """
    if "" in (workdir, name) or (workdir and name):
        raise UserError("give either --workdir or --name, and not empty; or omit both")
    named = workdir or (name and f"runs/{name}")
    source = config or (named if mode == "evaluate" else None)
    if not source:
        raise UserError("--config is missing; try --config=configs/glyphs.py")
    steps = _parse_steps(profile)
    from hypjax.config import default_workdir, override, read_config, show_origins, validate
    from hypjax.runs.cloud_copy import reading
    from hypjax.runs.workdir import read_saved_config
    from hypjax.system import caches

    if config:
        unchanged = read_config(config)
    else:
        with reading(named) as copy:
            unchanged = read_saved_config(copy)
    fields = override(unchanged.copy_and_resolve_references(), overrides)
    if print_:
        validate(fields)
        print(show_origins(fields, source, unchanged, overrides))
        return
    folder = os.path.expanduser(named or default_workdir(fields, unchanged))  # Or a URL.
    processes.join()
    caches.keep_compiled_programs()
    if dry_run:
        from hypjax.training.dry_run import dry_run as run_dry

        run_dry(fields)
    elif mode == "evaluate":
        _evaluate(fields, folder, output, pretrained=bool(fields.model.weights and not named))
    else:
        from hypjax.train import train_and_evaluate

        report = _write_report if fields.run.report else None
        launched = stopwatch.launch()
        train_and_evaluate(fields, folder, profile=steps, launched=launched, report=report)


def _evaluate(config: Any, folder: str, output: pathlib.Path | None, *, pretrained: bool) -> None:
    from hypjax.evaluate import evaluate, evaluate_pretrained
    from hypjax.parallel.processes import is_first
    from hypjax.system import console

    if pretrained and pathlib.Path(folder).exists():
        console.say(f"to evaluate the run in {folder} instead, add --workdir={folder}")
    results = evaluate_pretrained(config) if pretrained else evaluate(config, folder)
    if output and is_first():
        command.write_numbers(output, results)


def _write_report(run: Any) -> bool:
    from hypjax.analysis.report import write_own_report  # Matplotlib takes a second.
    from hypjax.system import console

    console.say("writing the report")
    return write_own_report(run)


def _parse_steps(text: str | None) -> tuple[int, int] | None:
    """Parses the first and last step of '10:15'."""
    if text is None:
        return None
    if not re.fullmatch("[0-9]+:[0-9]+", text):
        raise UserError(f"--profile is {text}; it must be two steps, such as 10:15")
    return tuple(map(int, text.split(":")))


if __name__ == "__main__":
    command.run(main, resumes=True)
