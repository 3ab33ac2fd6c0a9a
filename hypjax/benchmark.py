"""Measures the speed of hypjax on this machine, next to other libraries where installed.

python -m hypjax.benchmark [loss | retrieval | input | train | all]: one suite, or all four.
python -m hypjax.benchmark growth: how time and memory grow with problem size.
python -m hypjax.benchmark exactness: right answers of searches where points crowd.
python -m hypjax.benchmark ann: recall and speed of approximate searches.
python -m hypjax.benchmark memory: memory of the train step, which is compiled but not run.
python -m hypjax.benchmark job: where the time of a whole run goes, from launch to results.
"""

import functools
import importlib
import pathlib
from collections.abc import Collection
from typing import Any

from absl import flags

from hypjax import command
from hypjax.errors import UserError

SUITES = {  # With the optional package that each requires.
    "loss": "",
    "retrieval": "",
    "input": "grain",
    "train": "",
}
ALL, MEMORY, GROWTH, JOB = "all", "memory", "growth", "job"
EXACTNESS, ANN = "exactness", "ann"
CHOICES = (*SUITES, ALL, MEMORY, GROWTH, JOB, EXACTNESS, ANN)

EXAMPLE = "python -m hypjax.benchmark loss --quick"
FLAGS = flags.FlagValues()
_QUICK = flags.DEFINE_bool(
    "quick",
    False,
    "Run once at a tenth of the size, to check that everything works.",
    flag_values=FLAGS,
)
_REPEATS = flags.DEFINE_integer(
    "repeats", 5, "Number of timed repeats.", lower_bound=1, flag_values=FLAGS
)
_IMAGES = flags.DEFINE_string(
    "images", None, "input: folder of photos. Default: synthetic ones.", flag_values=FLAGS
)
_TARGET = flags.DEFINE_string(
    "target",
    None,
    "memory: TPU slice to compile for, such as v5e:2x4 (requires libtpu). Default: this machine.",
    flag_values=FLAGS,
)
_DEVICES = flags.DEFINE_integer(
    "devices",
    0,
    "memory: number of devices to compile for; 0 for all.",
    lower_bound=0,
    flag_values=FLAGS,
)
_CACHE = flags.DEFINE_enum(
    "cache",
    "host",
    ["none", "host", "device"],
    "job: value of config.run.cache.",
    flag_values=FLAGS,
)
_POINTS = flags.DEFINE_integer(
    "points", None, "ann: number of points. Default: 100,000.", lower_bound=1000, flag_values=FLAGS
)
_EXPORTED = flags.DEFINE_bool(
    "exported",
    False,
    "ann: only --export=usearch and its peer, which takes a tenth of the time.",
    flag_values=FLAGS,
)
_OUTPUT = flags.DEFINE_string(
    "output", "benchmark.json", "File for the measurements.", flag_values=FLAGS
)


def main(overrides: list[str], suite: str | None) -> None:
    """Runs one suite, or the four timed ones, and prints the tables."""
    if suite != JOB:
        command.refuse_overrides(overrides)
    from hypjax.system import console, machine
    from hypjax.system.files import write_json

    output = pathlib.Path(_OUTPUT.value).expanduser()
    if not output.parent.is_dir():
        raise UserError(f"--output is {output}, but the folder {output.parent} does not exist")
    if suite == MEMORY:
        results = _memory()
    elif suite == GROWTH:
        results = _growth()
    elif suite == EXACTNESS:
        results = _exactness()
    elif suite == ANN:
        results = _ann(output.with_suffix(".png"))
    elif suite == JOB:
        results = _job(overrides)
    else:
        results = _time_suites(SUITES if suite in (None, ALL) else [suite])
    with console.tolerating(str(output)):
        write_json(output, {"machine": machine.describe(seed=0), **results})
        print(f"wrote all measurements and versions to {output}")


def _time_suites(suites: Collection[str]) -> dict[str, Any]:
    from hypjax.benchmarks import measure, peers
    from hypjax.system import console

    repeats = 1 if _QUICK.value else _REPEATS.value
    results: dict[str, Any] = {"repeats": repeats}
    for name in suites:
        if SUITES[name] and not peers.installed(SUITES[name]):
            missing = f"{name} requires {SUITES[name]} (pip install {SUITES[name]})"
            if len(suites) == 1:
                raise UserError(missing)
            console.warn(f"skipped: {missing}")
            continue
        tasks = importlib.import_module(f"hypjax.benchmarks.{name}").tasks
        if name == "input":
            tasks = functools.partial(tasks, images=_IMAGES.value)
        measurements = [measure.measure(task, repeats) for task in tasks(_QUICK.value)]
        print(measure.table(measurements))
        results[name] = measure.as_json(measurements)
    return results


def _memory() -> dict[str, Any]:
    from hypjax.benchmarks import programs

    rows = programs.step_memory(_TARGET.value, _DEVICES.value, _QUICK.value)
    print(programs.memory_table(rows))
    return {"target": _TARGET.value, MEMORY: rows}


def _growth() -> dict[str, Any]:
    from hypjax.benchmarks import growth

    repeats = 1 if _QUICK.value else _REPEATS.value
    curves = [growth.measure_growth(curve, repeats) for curve in growth.curves(_QUICK.value)]
    print(growth.table(curves))
    return {"repeats": repeats, GROWTH: curves}


def _exactness() -> dict[str, Any]:
    from hypjax.benchmarks import exactness

    rows = list(exactness.rows(_QUICK.value))
    print(exactness.table(rows))
    return {EXACTNESS: rows}


def _ann(figure: pathlib.Path) -> dict[str, Any]:
    from hypjax.benchmarks import ann
    from hypjax.system import console

    rows = list(ann.rows(_QUICK.value, _REPEATS.value, _POINTS.value, _EXPORTED.value))
    print(ann.table(rows))
    with console.tolerating(str(figure)):
        ann.draw(rows, figure)
        print(f"drew recall against speed to {figure}")
    return {ANN: rows}


def _job(overrides: list[str]) -> dict[str, Any]:
    from hypjax.benchmarks import job

    runs = job.whole_runs(_QUICK.value, _CACHE.value, overrides)
    print(job.table(runs))
    return {"cache": _CACHE.value, "overrides": overrides, JOB: runs}


if __name__ == "__main__":
    command.run(main, FLAGS, EXAMPLE, CHOICES)
