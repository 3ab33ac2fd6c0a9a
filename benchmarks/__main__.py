"""Measures the speed of hypjax on this machine, next to other libraries where installed.

python -m benchmarks [loss | retrieval | input | train | all]: one suite, or all four.
python -m benchmarks growth: how time and memory grow with problem size.
python -m benchmarks exactness: correctness of searches where points crowd.
python -m benchmarks ann: recall and speed of approximate searches.
python -m benchmarks engines: speed of frozen encoders on a CPU, by engine.
python -m benchmarks memory: memory of the train step, which is compiled but not run.
python -m benchmarks parity: whether this device computes the same as a CPU.
python -m benchmarks programs: what compiled programs move and need, also on absent GPUs.
python -m benchmarks job: where the time of a whole run goes, from launch to results.
python -m benchmarks finetune: scores of an encoder that each loss fine-tunes, with equal budgets.
python -m benchmarks waits: seconds that people wait for commands, and where they go.
python -m benchmarks spine: reads of configurations, and the files that data pass on their way.
"""

import importlib
import pathlib
from collections.abc import Sequence
from typing import Any, Literal

from hypjax import command
from hypjax.errors import UserError

_TIMED = ("loss", "retrieval", "input", "train")
_MODULES = {"memory": "programs"}  # Modules of suites that are not named after them.
_OTHERS = ("memory", "parity", "programs", "growth", "job", "exactness", "ann", "waits", "spine")
_OTHERS += ("engines", "finetune")


def main(
    suite: Literal[*_TIMED, "all", *_OTHERS] = "all",
    /,
    *,
    overrides: Sequence[str] = (),
    quick: bool = False,
    repeats: command.Positive = 3,
    images: str | None = None,
    target: str | None = None,
    devices: command.Natural = 0,
    hlo: str | None = None,
    cache: Literal["none", "host", "device"] = "host",
    recipe: str = "grocery.py:hyp-lite",
    output: str = "benchmark.json",
) -> None:
    """Runs one suite, or the four timed ones, and prints the tables.

    Args:
        suite: Suite to run.
        overrides: job, finetune: fields of the configuration to set, as FIELD=VALUE.
        quick: Run once at a tenth of the size, to check that everything works.
        repeats: Number of timed repeats.
        images: input: folder of photos. Default: synthetic photos.
        target: memory, programs: device to compile for: a TPU slice such as v5e:2x4 (requires
            libtpu), or t4, v100, a100, l4, h100, b200 (requires the extra cuda12). Default: this
            machine.
        devices: memory, programs: number of devices; 0 for all.
        hlo: programs: folder in which to keep the texts of the programs.
        cache: job, finetune: value of config.run.cache.
        recipe: finetune: configuration of the loss hyp, for which the other losses are put.
        output: File for the measurements.

    Example:
        python -m benchmarks loss --quick
    """
    if suite not in ("job", "finetune"):
        command.refuse_overrides(overrides)
    file = pathlib.Path(output).expanduser()
    if not file.parent.is_dir():
        raise UserError(f"--output is {file}, but the folder {file.parent} does not exist")
    options = {"quick": quick, "repeats": repeats, "images": images, "target": target}
    options |= {"devices": devices, "hlo": hlo, "cache": cache, "recipe": recipe}
    _measure(_TIMED if suite == "all" else (suite,), options, overrides, file)


def _measure(
    suites: Sequence[str], options: dict[str, Any], overrides: Sequence[str], output: pathlib.Path
) -> None:
    """Runs suites, prints their tables, and writes the measurements."""
    from benchmarks import measure
    from hypjax.system import console, machine
    from hypjax.system.files import write_json

    results: dict[str, Any] = {}
    try:
        for name in suites:
            module = importlib.import_module(f"benchmarks.{_MODULES.get(name, name)}")
            suite_options = measure.Options(name, **options, overrides=overrides)
            rows = results[name] = []
            try:
                rows.extend(module.rows(suite_options))
            finally:  # Prints the rows measured before an interrupt or an error.
                if rows:
                    print(measure.table(module.COLUMNS, rows))
            if hasattr(module, "conclude"):
                module.conclude(rows, output)
    finally:
        if any(results.values()):
            with console.tolerating(str(output)):
                described = {"machine": machine.describe(seed=0), **options, "overrides": overrides}
                write_json(output, described | results)
                print(f"wrote measurements and versions to {output}")


if __name__ == "__main__":
    command.run(main)
