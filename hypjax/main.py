"""Trains and evaluates."""

import os
import pathlib
import re
from typing import Annotated, Any, Literal

from hypjax import command
from hypjax.errors import UserError
from hypjax.fields import Rule
from hypjax.monitoring import stopwatch

_Steps = Annotated[str, Rule(re.compile("[0-9]+:[0-9]+").fullmatch, "two steps, such as 10:15")]


def main(
    *,
    overrides: list[str],
    config: str | None = None,
    workdir: str | None = None,
    name: str | None = None,
    mode: Literal["train", "evaluate"] = "train",
    print_: bool = False,
    dry_run: bool = False,
    target: str | None = None,
    output: command.Numbers | None = None,
    coordinator: str | None = None,
    num_processes: command.Positive | None = None,
    process_id: command.Natural | None = None,
    profile: _Steps | None = None,
) -> None:
    """Trains or evaluates a model.

    Args:
        overrides: Fields of the configuration to set, as FIELD=VALUE.
        config: Configuration, such as configs/glyphs.py:sph, or the folder of a run with the same
            fields; --config.FIELD=VALUE sets a field.
        workdir: Folder of the run, or its URL. Default: runs/<config>-<variant>, followed by the
            fields that were set, or a hash of them if they are long.
        name: Name of the default folder: --name=birds is short for --workdir=runs/birds.
        mode: Train and then evaluate, or only evaluate the run in --workdir. Without --workdir,
            evaluate the run in the default folder or, if model.weights is set, those weights.
        print_: Print all fields, their values and where these come from; then stop.
        dry_run: Run a few steps, print memory and expected time; then stop. Nothing is saved.
        target: With --dry_run: compile for absent devices instead, without images and weights, such
            as h100:8 (t4, v100, a100, l4, h100, b200) or a slice of TPUs such as v5e:2x4.
        output: With --mode=evaluate: file to write the scores to, such as scores.json.
        coordinator: HOST:PORT of the first of several processes, or auto (Slurm, Open MPI, TPU).
        num_processes: With --coordinator: number of processes; auto finds it.
        process_id: With --coordinator: index of this process, from 0; auto finds it.
        profile: With --mode=train: steps to trace for TensorBoard or Perfetto, such as 10:15.

    Example:
        python -m hypjax.main --config=configs/glyphs.py:sph
    """
    if "" in (workdir, name) or (workdir and name):
        raise UserError("give either --workdir or --name, and not empty; or omit both")
    folder = workdir or (f"runs/{name}" if name else None)
    if mode == "evaluate" and config and _is_run(config):
        folder = folder or config
    source, original = _read_config(config, folder if mode == "evaluate" else None)
    from hypjax.config import default_workdir, override, show_origins, validate
    from hypjax.system import caches

    fields = override(original.copy_and_resolve_references(), overrides)
    if print_:
        validate(fields)
        print(show_origins(fields, source, original, overrides))
        return
    location = os.path.expanduser(folder or default_workdir(fields, original))
    if coordinator is not None:
        from hypjax.parallel import processes

        processes.join(coordinator, num_processes, process_id)
    caches.keep_compiled_programs()
    if mode == "train" or dry_run:
        _train(fields, location, profile, dry_run=dry_run, target=target)
    else:
        _evaluate(fields, location, output, pretrained=bool(fields.model.weights) and not folder)


def _is_run(config: str) -> bool:
    """Whether a configuration is the folder of a run."""
    from hypjax.runs.files import CONFIG

    return (pathlib.Path(config) / CONFIG).is_file()


def _read_config(config: str | None, folder: str | None) -> tuple[str, Any]:
    """Reads a configuration or, without one, that of a run; returns its source and its fields."""
    if not (source := config or folder):
        raise UserError("--config is missing; try --config=configs/glyphs.py")
    from hypjax.config import read_config
    from hypjax.runs.cloud_copy import reading
    from hypjax.runs.workdir import read_saved_config

    if config and not _is_run(config):
        return source, read_config(source)
    with reading(source) as local_folder:
        return source, read_saved_config(local_folder)


def _train(
    config: Any, folder: str, profile: str | None, *, dry_run: bool, target: str | None
) -> None:
    """Trains a run, and writes its report page if the configuration asks for one."""
    if dry_run:
        from hypjax.dry_run import dry_run as run_dry

        run_dry(config, target)
        return
    from hypjax.train import train_and_evaluate

    def write_report(run: Any) -> bool:
        from hypjax.analysis.report import write_own_report  # Matplotlib takes a second.

        return write_own_report(run)

    report = write_report if config.run.report else None
    first, last = map(int, (profile or "0:0").split(":"))
    steps = (first, last) if profile else None
    launched = stopwatch.LAUNCHED
    train_and_evaluate(config, folder, profile=steps, launched=launched, report=report)


def _evaluate(config: Any, folder: str, output: pathlib.Path | None, *, pretrained: bool) -> None:
    """Evaluates the run in the folder, or the weights in `config.model.weights`."""
    from hypjax.evaluate import evaluate, evaluate_pretrained
    from hypjax.parallel.processes import is_first
    from hypjax.system import console

    if pretrained and pathlib.Path(folder).exists():
        console.say(f"to evaluate the run in {folder} instead, add --workdir={folder}")
    results = evaluate_pretrained(config) if pretrained else evaluate(config, folder)
    if output and is_first():
        command.write_numbers(output, results)


if __name__ == "__main__":
    command.run(main, resumes=True)
