"""Trains and evaluates."""

import pathlib
import re
from typing import Any

from hypjax import command
from hypjax.errors import UserError
from hypjax.monitoring import stopwatch

EXAMPLE = "python -m hypjax.main --config=configs/glyphs.py:sph"
FLAGS = command.Flags(
    overrides=True,
    config=command.string(
        "Configuration file, optionally with a variant after a colon: configs/glyphs.py:sph. "
        "--config.FIELD=VALUE sets one of its fields."
    ),
    workdir=command.string(
        "Folder of the run, or its URL in cloud storage. Default: runs/<config>-<variant>, "
        "followed by the fields that were set, or a hash of them if they are long."
    ),
    name=command.string(
        "Name of the default folder: --name=birds is short for --workdir=runs/birds."
    ),
    mode=command.enum(
        "Train and then evaluate, or only evaluate the run in --workdir. Without that flag it is "
        "the run in the default folder or, if model.weights is set, the pretrained encoder.",
        "train",
        enum_values=["train", "evaluate"],
    ),
    print=command.boolean(
        "Print all fields of the configuration, their values and where these come from; then stop."
    ),
    dry_run=command.boolean(
        "Open the images and weights, compile the training step, run a few steps, print memory and "
        "expected time; then stop. Nothing is saved."
    ),
    coordinator=command.string(
        "For runs with several processes: HOST:PORT of the first one, or auto (Slurm, Open MPI, "
        "TPU)."
    ),
    num_processes=command.positive("Number of processes, unless --coordinator=auto."),
    process_id=command.natural("Index of this process, from 0."),
    profile=command.string("Range of steps to trace for TensorBoard or Perfetto, such as 10:15."),
)


def main(overrides: list[str]) -> None:
    """Trains or evaluates, as the flags say."""
    from hypjax.config import default_workdir, override, read_config, show_origins, validate
    from hypjax.runs.cloud_copy import reading
    from hypjax.runs.workdir import read_saved_config
    from hypjax.system import caches, console
    from hypjax.system.cloud import is_url

    for flag in ("workdir", "name"):
        if FLAGS[flag].value == "":
            raise UserError(f"--{flag} is empty; name a folder, or omit the flag")
    if FLAGS.workdir and FLAGS.name:
        raise UserError("give either --workdir or --name")
    evaluates = FLAGS.mode == "evaluate"
    if evaluates and FLAGS.profile:
        raise UserError("--profile is for training; omit it with --mode=evaluate")
    named = FLAGS.workdir or (FLAGS.name and f"runs/{FLAGS.name}")
    source = FLAGS.config or (named if evaluates else None)
    if not source:
        raise UserError("--config is missing; try --config=configs/glyphs.py")
    if FLAGS.config:
        unchanged = read_config(source)
    else:
        with reading(source) as folder:
            unchanged = read_saved_config(folder)
    config = override(unchanged.copy_and_resolve_references(), overrides)
    if FLAGS.print:
        validate(config)
        print(show_origins(config, source, unchanged, overrides))
        return
    workdir = named or default_workdir(config, unchanged)
    if not is_url(workdir):
        workdir = pathlib.Path(workdir).expanduser()
    profile = _parse_steps(FLAGS.profile)
    known = (FLAGS.num_processes, FLAGS.process_id)
    if FLAGS.coordinator is not None:
        from hypjax.parallel import processes

        processes.join(FLAGS.coordinator, *known)
    elif known != (None, None):
        raise UserError("--coordinator is missing: HOST:PORT of the first process")
    caches.keep_compiled_programs()
    if FLAGS.dry_run:
        from hypjax.training.dry_run import dry_run

        dry_run(config)
    elif evaluates:
        from hypjax.evaluate import evaluate, evaluate_pretrained

        if config.model.weights and not named:
            if pathlib.Path(workdir).exists():
                console.say(f"to evaluate the run in {workdir} instead, add --workdir={workdir}")
            evaluate_pretrained(config)
        else:
            evaluate(config, workdir)
    else:
        from hypjax.train import train_and_evaluate

        report = _write_report if config.run.report else None
        train_and_evaluate(config, workdir, profile, stopwatch.launch(), report)


def _write_report(run: Any) -> bool:
    from hypjax.analysis.report import write_own_report  # Matplotlib takes a second.

    return write_own_report(run)


def _parse_steps(text: str | None) -> tuple[int, int] | None:
    """Parses the first and last step of '10:15'."""
    if text is None:
        return None
    if not re.fullmatch("[0-9]+:[0-9]+", text):
        raise UserError(f"--profile is {text}; it must be two steps, such as 10:15")
    return tuple(map(int, text.split(":")))


if __name__ == "__main__":
    command.run(main, FLAGS, EXAMPLE, resumes=True)
