"""Measures the speed of hypjax on this machine, next to other libraries where installed.

python -m benchmarks [loss | retrieval | input | train | all]: one suite, or all four.
python -m benchmarks growth: how time and memory grow with problem size.
python -m benchmarks exactness: right answers of searches where points crowd.
python -m benchmarks ann: recall and speed of approximate searches.
python -m benchmarks memory: memory of the train step, which is compiled but not run.
python -m benchmarks parity: whether this device computes what a CPU does.
python -m benchmarks programs: what compiled programs move and need, also on absent GPUs.
python -m benchmarks job: where the time of a whole run goes, from launch to results.
"""

import importlib
import pathlib
from typing import Any

from hypjax import command
from hypjax.errors import UserError

_TIMED = ("loss", "retrieval", "input", "train")
_MODULES = {"memory": "programs"}  # Of suites that have no module of their own name.
CHOICES = (*_TIMED, "all", "memory", "parity", "programs", "growth", "job", "exactness", "ann")

EXAMPLE = "python -m benchmarks loss --quick"
FLAGS = command.Flags(
    overrides=True,
    quick=command.boolean("Run once at a tenth of the size, to check that everything works."),
    repeats=command.positive("Number of timed repeats.", 3),
    images=command.string("input: folder of photos. Default: synthetic ones."),
    target=command.string(
        "memory, programs: what to compile for: a TPU slice such as v5e:2x4 (requires libtpu), or "
        "t4, v100, a100, l4, h100, b200 (requires the extra cuda12). Default: this machine."
    ),
    devices=command.natural("memory, programs: number of devices; 0 for all.", 0),
    hlo=command.string("programs: folder in which to keep the texts of the programs."),
    cache=command.enum(
        "job: value of config.run.cache.", "host", enum_values=["none", "host", "device"]
    ),
    output=command.string("File for the measurements.", "benchmark.json"),
)


def main(overrides: list[str], suite: str | None) -> None:
    """Runs one suite, or the four timed ones, and prints the tables."""
    if suite != "job":
        command.refuse_overrides(overrides)
    from benchmarks import measure
    from hypjax.system import console, machine
    from hypjax.system.files import write_json

    output = pathlib.Path(FLAGS.output).expanduser()
    if not output.parent.is_dir():
        raise UserError(f"--output is {output}, but the folder {output.parent} does not exist")
    given = {name: FLAGS[name].value for name in measure.Options._fields if name in FLAGS}
    results: dict[str, Any] = {}
    try:
        for name in _TIMED if suite in (None, "all") else (suite,):
            module = importlib.import_module(f"benchmarks.{_MODULES.get(name, name)}")
            options = measure.Options(name, **given, overrides=overrides)
            rows = results[name] = []
            try:
                rows.extend(module.rows(options))
            finally:  # An interrupt or an error keeps the rows before it.
                if rows:
                    print(measure.table(module.COLUMNS, rows))
            if hasattr(module, "conclude"):
                module.conclude(rows, output)
    finally:
        if any(results.values()):
            with console.tolerating(str(output)):
                described = {"machine": machine.describe(seed=0), **given, "overrides": overrides}
                write_json(output, described | results)
                print(f"wrote measurements and versions to {output}")


if __name__ == "__main__":
    command.run(main, FLAGS, EXAMPLE, CHOICES)
