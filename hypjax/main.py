"""Trains and evaluates."""

import os
import pathlib
import re
from typing import Any, Literal

from hypjax import command
from hypjax.errors import UserError
from hypjax.monitoring import stopwatch


def main(
    *,
    overrides: list[str],
    config: str | None = None,
    workdir: str | None = None,
    name: str | None = None,
    mode: Literal["train", "evaluate"] = "train",
    print_: bool = False,
    dry_run: bool = False,
    output: command.Numbers | None = None,
    coordinator: str | None = None,
    num_processes: command.Positive | None = None,
    process_id: command.Natural | None = None,
    profile: str | None = None,
) -> None:
    """Trains or evaluates a model.

    Args:
        overrides: Fields of the configuration to set, as FIELD=VALUE.
        config: Configuration, such as configs/glyphs.py:sph; --config.FIELD=VALUE sets a field.
        workdir: Folder of the run, or its URL in cloud storage. Default: runs/<config>-<variant>,
            followed by the fields that were set, or a hash of them if they are long.
        name: Name of the default folder: --name=birds is short for --workdir=runs/birds.
        mode: Train and then evaluate, or only evaluate the run in --workdir. Without --workdir,
            evaluate the run in the default folder or, if model.weights is set, those weights.
        print_: Print all fields, their values and where these come from; then stop.
        dry_run: Run a few steps, print memory and expected time; then stop. Nothing is saved.
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
    named_folder = workdir or (name and f"runs/{name}")
    source = config or (named_folder if mode == "evaluate" else None)
    if not source:
        raise UserError("--config is missing; try --config=configs/glyphs.py")
    traced_steps = _parse_steps(profile)
    from hypjax.config import default_workdir, override, read_config, show_origins, validate
    from hypjax.runs.cloud_copy import reading
    from hypjax.runs.workdir import read_saved_config
    from hypjax.system import caches

    if config:
        original = read_config(config)
    else:
        with reading(named_folder) as folder:
            original = read_saved_config(folder)
    fields = override(original.copy_and_resolve_references(), overrides)
    if print_:
        validate(fields)
        print(show_origins(fields, source, original, overrides))
        return
    folder_or_url = os.path.expanduser(named_folder or default_workdir(fields, original))
    if coordinator is not None:
        from hypjax.parallel import processes

        processes.join(coordinator, num_processes, process_id)
    caches.keep_compiled_programs()
    if dry_run:
        from hypjax.training.dry_run import dry_run as run_dry

        run_dry(fields)
    elif mode == "evaluate":
        pretrained = bool(fields.model.weights) and not named_folder
        _evaluate(fields, folder_or_url, output, pretrained=pretrained)
    else:
        from hypjax.train import train_and_evaluate

        report = _write_report if fields.run.report else None
        options = {"launched": stopwatch.LAUNCHED, "report": report}
        train_and_evaluate(fields, folder_or_url, profile=traced_steps, **options)


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


def _write_report(run: Any) -> bool:
    """Writes the run's report page; returns whether it was written."""
    from hypjax.analysis.report import write_own_report  # Matplotlib takes a second.

    return write_own_report(run)


def _parse_steps(text: str | None) -> tuple[int, int] | None:
    """Parses '10:15' into the first and the last step."""
    if text is None:
        return None
    if not re.fullmatch("[0-9]+:[0-9]+", text):
        raise UserError(f"--profile is {text}; it must be two steps, such as 10:15")
    return tuple(map(int, text.split(":")))


if __name__ == "__main__":
    command.run(main, resumes=True)
