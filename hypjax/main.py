"""Trains and evaluates: python -m hypjax.main --config=configs/glyphs.py."""

import pathlib

from absl import flags

from hypjax import command
from hypjax.errors import UserError

_CONFIG = flags.DEFINE_string(
    "config",
    None,
    "Configuration file, with a variant after a colon: configs/glyphs.py:sph. "
    "--config.FIELD=VALUE sets a field of it.",
)
_WORKDIR = flags.DEFINE_string(
    "workdir", None, "Folder of the run. Default: runs/<config>-<variant>, and a hash of overrides."
)
_MODE = flags.DEFINE_enum(
    "mode", "train", ["train", "evaluate"], "Train and evaluate, or evaluate a finished run."
)


def main(overrides: list[str]) -> None:
    """Runs the mode that the flags ask for."""
    from hypjax import config_files
    from hypjax.config import default_workdir

    if not _CONFIG.value:
        raise UserError("no configuration named; try --config=configs/glyphs.py")
    config = config_files.load(_CONFIG.value, overrides)
    default = default_workdir(config, unchanged=config_files.load(_CONFIG.value))
    workdir = pathlib.Path(_WORKDIR.value or default).expanduser()
    if _MODE.value == "evaluate":
        from hypjax.evaluate import evaluate

        evaluate(config, workdir)
    else:
        from hypjax.train import train_and_evaluate

        train_and_evaluate(config, workdir)


if __name__ == "__main__":
    command.run(main)
