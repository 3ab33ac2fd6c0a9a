"""Trains and evaluates."""

import pathlib
from typing import Any

from hypjax import command
from hypjax.errors import UserError
from hypjax.monitoring import stopwatch

EXAMPLE = "python -m hypjax.main --config=configs/glyphs.py:sph"
FLAGS = command.Flags(overrides=True)
_CONFIG = FLAGS.string(
    "config",
    None,
    "Configuration file, optionally with a variant after a colon: configs/glyphs.py:sph. "
    "--config.FIELD=VALUE sets one of its fields.",
)
_WORKDIR = FLAGS.string(
    "workdir",
    None,
    "Folder of the run, or its URL in cloud storage. Default: runs/<config>-<variant>, followed by "
    "the fields that were set, or a hash of them if they are long.",
)
_NAME = FLAGS.string(
    "name", None, "Name of the default folder: --name=birds is short for --workdir=runs/birds."
)
_MODE = FLAGS.enum(
    "mode",
    "train",
    ["train", "evaluate"],
    "Train and then evaluate, or only evaluate the run in --workdir. Without that flag it is the "
    "run in the default folder or, if model.weights is set, the pretrained encoder.",
)
_PRINT = FLAGS.boolean(
    "print",
    False,
    "Print all fields of the configuration, their values and where these come from; then stop.",
)
_DRY_RUN = FLAGS.boolean(
    "dry_run",
    False,
    "Open the images and weights, compile the training step, run a few steps, print memory and "
    "expected time; then stop. Nothing is saved.",
)
_COORDINATOR = FLAGS.string(
    "coordinator",
    None,
    "For runs with several processes: HOST:PORT of the first one, or auto (Slurm, Open MPI, TPU).",
)
_NUM_PROCESSES = FLAGS.integer(
    "num_processes", None, "Number of processes, unless --coordinator=auto.", lower_bound=1
)
_PROCESS_ID = FLAGS.integer("process_id", None, "Index of this process, from 0.", lower_bound=0)
_PROFILE = FLAGS.string(
    "profile", None, "Range of steps to trace for TensorBoard or Perfetto, such as 10:15."
)


def main(overrides: list[str]) -> None:
    """Trains or evaluates, as the flags say."""
    from hypjax.config import default_workdir, override, read_config, show_origins, validate
    from hypjax.runs.workdir import read_run_config
    from hypjax.system import console
    from hypjax.system.caches import keep_compiled_programs
    from hypjax.system.cloud import is_url

    for flag in (_WORKDIR, _NAME):
        if flag.value == "":
            raise UserError(f"--{flag.name} is empty; name a folder, or omit the flag")
    if _WORKDIR.value and _NAME.value:
        raise UserError("give either --workdir or --name")
    if _MODE.value == "evaluate" and _PROFILE.value:
        raise UserError("--profile is for training; omit it with --mode=evaluate")
    named = _WORKDIR.value or (_NAME.value and f"runs/{_NAME.value}")
    source = _CONFIG.value or named
    if not _CONFIG.value and not (_MODE.value == "evaluate" and named):
        raise UserError("--config is missing; try --config=configs/glyphs.py")
    read = read_config if _CONFIG.value else read_run_config
    unchanged = read(source)
    config = override(unchanged.copy_and_resolve_references(), overrides)
    if _PRINT.value:
        validate(config)
        print(show_origins(config, source, unchanged, overrides))
        return
    workdir = named or default_workdir(config, unchanged)
    if not is_url(workdir):
        workdir = pathlib.Path(workdir).expanduser()
    profile = _parse_steps(_PROFILE.value)
    known = (_NUM_PROCESSES.value, _PROCESS_ID.value)
    if _COORDINATOR.value is not None:
        from hypjax.parallel import processes

        processes.join(_COORDINATOR.value, *known)
    elif known != (None, None):
        raise UserError("--coordinator is missing: HOST:PORT of the first process")
    keep_compiled_programs()
    if _DRY_RUN.value:
        from hypjax.training.dry_run import dry_run

        dry_run(config)
    elif _MODE.value == "evaluate":
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


def _write_report(*finished: Any) -> bool:
    from hypjax.analysis.report import write_own_report  # Matplotlib takes a second.

    return write_own_report(*finished)


def _parse_steps(text: str | None) -> tuple[int, int] | None:
    """Parses the first and last step of '10:15'."""
    if text is None:
        return None
    first, _, last = text.partition(":")
    if not (first.isdecimal() and last.isdecimal()):
        raise UserError(f"--profile is {text}; it must be two steps, such as 10:15")
    return int(first), int(last)


if __name__ == "__main__":
    command.run(main, FLAGS, EXAMPLE, resumes=True)
