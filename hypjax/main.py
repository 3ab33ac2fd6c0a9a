"""Trains and evaluates: python -m hypjax.main --config=configs/glyphs.py."""

import pathlib

from absl import flags

from hypjax import command
from hypjax.errors import UserError
from hypjax.monitoring import stopwatch

_CONFIG = flags.DEFINE_string(
    "config",
    None,
    "Configuration file, with a variant after a colon: configs/glyphs.py:sph. "
    "--config.FIELD=VALUE sets a field of it.",
)
_WORKDIR = flags.DEFINE_string(
    "workdir",
    None,
    "Folder of the run, or its URL in cloud storage. Default: runs/<config>-<variant>, and a hash "
    "of overrides.",
)
_MODE = flags.DEFINE_enum(
    "mode",
    "train",
    ["train", "evaluate"],
    "Train and evaluate, or evaluate: the run in --workdir; without it, the pretrained encoder.",
)
_COORDINATOR = flags.DEFINE_string(
    "coordinator",
    None,
    "For a run of several processes: HOST:PORT of the first one, or auto (Slurm, Open MPI, TPU).",
)
_NUM_PROCESSES = flags.DEFINE_integer(
    "num_processes", None, "How many there are, where the coordinator is named.", lower_bound=1
)
_PROCESS_ID = flags.DEFINE_integer(
    "process_id", None, "Which of them this is, from 0.", lower_bound=0
)
_PROFILE = flags.DEFINE_string(
    "profile", None, "Steps to write a trace of, such as 10:15, for TensorBoard or Perfetto."
)


def main(overrides: list[str]) -> None:
    """Runs the mode that the flags ask for."""
    from hypjax.config import default_workdir, load_config, read_config
    from hypjax.system import console
    from hypjax.system.caches import keep_compiled_programs
    from hypjax.system.cloud import is_url

    if _WORKDIR.value == "":
        raise UserError("--workdir is empty; name a folder, or leave the flag out")
    if _MODE.value == "evaluate" and _PROFILE.value:
        raise UserError("--profile is for training; leave it out with --mode=evaluate")
    if not _CONFIG.value:
        raise UserError("no configuration named; try --config=configs/glyphs.py")
    config = load_config(_CONFIG.value, overrides)
    default = default_workdir(config, unchanged=read_config(_CONFIG.value))
    workdir = _WORKDIR.value or default
    if not is_url(workdir):
        workdir = pathlib.Path(workdir).expanduser()
    profile = _steps(_PROFILE.value)
    _join()
    keep_compiled_programs()
    if _MODE.value == "evaluate":
        from hypjax.evaluate import evaluate, evaluate_pretrained

        if config.model.weights and not _WORKDIR.value:
            if pathlib.Path(workdir).exists():
                console.say(f"the run in {workdir} is evaluated with --workdir={workdir}")
            evaluate_pretrained(config)
        else:
            evaluate(config, workdir)
    else:
        from hypjax.train import train_and_evaluate

        train_and_evaluate(config, workdir, profile, stopwatch.launch())


def _join() -> None:
    """Meets the other processes of the run, if there are any."""
    known = (_NUM_PROCESSES.value, _PROCESS_ID.value)
    if _COORDINATOR.value is None:
        if known != (None, None):
            raise UserError("--coordinator is missing: HOST:PORT of the first process")
        return
    from hypjax.parallel import processes

    processes.join(_COORDINATOR.value, *known)


def _steps(text: str | None) -> tuple[int, int] | None:
    """Reads '10:15'."""
    if text is None:
        return None
    first, _, last = text.partition(":")
    if not (first.isdecimal() and last.isdecimal()):
        raise UserError(f"--profile is {text}; it must be two steps, such as 10:15")
    return int(first), int(last)


if __name__ == "__main__":
    command.run(main)
