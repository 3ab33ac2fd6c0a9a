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
_ALL, _JOB, _ANN = "all", "job", "ann"
CHOICES = (*_TIMED, _ALL, "memory", "parity", "programs", "growth", _JOB, "exactness", _ANN)

EXAMPLE = "python -m benchmarks loss --quick"
FLAGS = command.Flags(overrides=True)
FLAGS.boolean("quick", False, "Run once at a tenth of the size, to check that everything works.")
FLAGS.integer("repeats", 3, "Number of timed repeats.", lower_bound=1)
FLAGS.string("images", None, "input: folder of photos. Default: synthetic ones.")
FLAGS.string(
    "target",
    None,
    "memory, programs: what to compile for: a TPU slice such as v5e:2x4 (requires libtpu), or t4, "
    "v100, a100, l4, h100, b200 (requires the extra cuda12). Default: this machine.",
)
FLAGS.integer("devices", 0, "memory, programs: number of devices; 0 for all.", lower_bound=0)
FLAGS.string("hlo", None, "programs: folder in which to keep the texts of the programs.")
FLAGS.enum("cache", "host", ["none", "host", "device"], "job: value of config.run.cache.")
FLAGS.integer("points", None, "ann: number of points. Default: 100,000.", lower_bound=1000)
FLAGS.boolean(
    "exported", False, "ann: only --export=usearch and its peer, which takes a tenth of the time."
)
_OUTPUT = FLAGS.string("output", "benchmark.json", "File for the measurements.")


def main(overrides: list[str], suite: str | None) -> None:
    """Runs one suite, or the four timed ones, and prints the tables."""
    if suite != _JOB:
        command.refuse_overrides(overrides)
    from benchmarks import measure, peers
    from hypjax.system import console, machine
    from hypjax.system.files import write_json

    output = pathlib.Path(_OUTPUT.value).expanduser()
    if not output.parent.is_dir():
        raise UserError(f"--output is {output}, but the folder {output.parent} does not exist")
    given = {name: FLAGS[name].value for name in measure.Options._fields if name in FLAGS}
    options = measure.Options(**given, overrides=overrides)
    if options.quick:
        options = options._replace(repeats=1)
    results: dict[str, Any] = {}
    try:
        for name in _TIMED if suite in (None, _ALL) else (suite,):
            if name == "input" and suite != name and not peers.installed("grain"):
                console.warn("skipped: input requires grain (pip install grain)")
                continue
            module = importlib.import_module(f"benchmarks.{name}")
            if name not in _TIMED:
                results[name] = module.rows(options)
                print(module.table(results[name]))
                continue
            results[name] = []
            try:
                results[name].extend(measure.measure(module.tasks(options), options.repeats))
            finally:  # An interrupt or an error keeps the rows before it.
                print(measure.table(results[name]))
        if suite == _ANN:
            figure = output.with_suffix(".png")
            with console.tolerating(str(figure)):
                module.draw(results[_ANN], figure)
                print(f"drew recall against speed to {figure}")
    finally:
        if any(results.values()):
            with console.tolerating(str(output)):
                described = {"machine": machine.describe(seed=0), **options._asdict()}
                write_json(output, described | results)
                print(f"wrote measurements and versions to {output}")


if __name__ == "__main__":
    command.run(main, FLAGS, EXAMPLE, CHOICES)
