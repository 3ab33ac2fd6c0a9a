"""Measures this machine, beside peers where they are installed.

python -m hypjax.benchmark [loss | retrieval | input | train | all]: one suite, or these four.
python -m hypjax.benchmark growth: how time and memory grow with the sizes. python -m
hypjax.benchmark memory: how much the train step takes, by compiling it without running it. python
-m hypjax.benchmark job: where the time of a whole run goes, from its launch to its results.
"""

import functools
import importlib
import pathlib
from collections.abc import Collection
from typing import Any

from absl import flags

from hypjax import command
from hypjax.errors import UserError

SUITES = {  # And what each needs that the others do not.
    "loss": "",
    "retrieval": "",
    "input": "grain",
    "train": "",
}
ALL, MEMORY, GROWTH, JOB = "all", "memory", "growth", "job"

_QUICK = flags.DEFINE_bool("quick", False, "A tenth of the size, once: to see that all works.")
_REPEATS = flags.DEFINE_integer("repeats", 5, "How often each is timed.", lower_bound=1)
_IMAGES = flags.DEFINE_string(
    "images", None, "Folder of photos for the input suite; None: some are made."
)
_TARGET = flags.DEFINE_string(
    "target",
    None,
    "memory: TPU slice to compile for, such as v5e:2x4 (needs libtpu); None: this machine.",
)
_DEVICES = flags.DEFINE_integer(
    "devices", 0, "memory: how many to compile for; 0: all.", lower_bound=0
)
_CACHE = flags.DEFINE_enum(
    "cache", "host", ["none", "host", "device"], "config.run.cache of the job suite's runs."
)
_OUTPUT = flags.DEFINE_string("output", "benchmark.json", "File for the figures.")


def main(overrides: list[str], suite: str | None) -> None:
    """Runs a suite, or those that time something, and prints its table."""
    if suite != JOB:
        command.refuse_overrides(overrides)
    from hypjax.system import console, environment
    from hypjax.system.files import write_json

    output = pathlib.Path(_OUTPUT.value).expanduser()
    if not output.parent.is_dir():
        raise UserError(f"--output is {output}, but there is no folder {output.parent}; make it")
    if suite == MEMORY:
        results = _memory()
    elif suite == GROWTH:
        results = _growth()
    elif suite == JOB:
        results = _job(overrides)
    else:
        results = _timed(SUITES if suite in (None, ALL) else [suite])
    with console.tolerating(str(output)):
        write_json(output, {"machine": environment.describe(seed=0), **results})
        print(f"in {output}, with versions and all figures")


def _timed(suites: Collection[str]) -> dict[str, Any]:
    from hypjax.benchmarks import measure, peers
    from hypjax.system import console

    repeats = 1 if _QUICK.value else _REPEATS.value
    results: dict[str, Any] = {"repeats": repeats}
    for name in suites:
        if SUITES[name] and not peers.installed(SUITES[name]):
            missing = f"{name} needs {SUITES[name]} (pip install {SUITES[name]})"
            if len(suites) == 1:
                raise UserError(missing)
            console.warn(f"left out: {missing}")
            continue
        works = importlib.import_module(f"hypjax.benchmarks.{name}").works
        if name == "input":
            works = functools.partial(works, images=_IMAGES.value)
        outcomes = [measure.measure(work, repeats) for work in works(_QUICK.value)]
        print(measure.table(outcomes))
        results[name] = measure.as_json(outcomes)
    return results


def _memory() -> dict[str, Any]:
    from hypjax.benchmarks import programs

    rows = programs.step_memory(_TARGET.value, _DEVICES.value, _QUICK.value)
    print(programs.memory_table(rows))
    return {"target": _TARGET.value, MEMORY: rows}


def _growth() -> dict[str, Any]:
    from hypjax.benchmarks import growth

    repeats = 1 if _QUICK.value else _REPEATS.value
    curves = [growth.measured(curve, repeats) for curve in growth.curves(_QUICK.value)]
    print(growth.table(curves))
    return {"repeats": repeats, GROWTH: curves}


def _job(overrides: list[str]) -> dict[str, Any]:
    from hypjax.benchmarks import job

    runs = job.whole_runs(_QUICK.value, _CACHE.value, overrides)
    print(job.table(runs))
    return {"cache": _CACHE.value, "overrides": overrides, JOB: runs}


if __name__ == "__main__":
    command.run(main, choices=(*SUITES, ALL, MEMORY, GROWTH, JOB))
