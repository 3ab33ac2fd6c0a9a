"""Measures this machine, beside peers where they are installed.

python -m hypjax.benchmark [retrieval | input]: one suite, or all of them.
"""

import functools
import pathlib

from absl import flags

from hypjax import command

SUITES = ("retrieval", "input")

_QUICK = flags.DEFINE_bool("quick", False, "A tenth of the size, once: to see that all works.")
_REPEATS = flags.DEFINE_integer("repeats", 5, "How often each is timed.", lower_bound=1)
_IMAGES = flags.DEFINE_string(
    "images", None, "Folder of photos for the input suite; None: some are made."
)
_OUTPUT = flags.DEFINE_string("output", "benchmark.json", "File for the figures.")


def main(overrides: list[str], suite: str | None) -> None:
    """Runs a suite, or all of them, and prints its table."""
    command.refuse_overrides(overrides)
    from hypjax import provenance, reporting
    from hypjax.benchmarks import input as photos
    from hypjax.benchmarks import measure, retrieval

    works = {
        "retrieval": retrieval.works,
        "input": functools.partial(photos.works, images=_IMAGES.value),
    }
    repeats = 1 if _QUICK.value else _REPEATS.value
    results = {}
    for name in [suite] if suite else SUITES:
        outcomes = [measure.measure(work, repeats) for work in works[name](_QUICK.value)]
        print(measure.table(outcomes))
        results[name] = measure.as_json(outcomes)
    output = pathlib.Path(_OUTPUT.value).expanduser()
    with reporting.tolerating(str(output)):
        machine = provenance.describe(seed=0)
        reporting.write_json(output, {"machine": machine, "repeats": repeats, **results})
        print(f"in {output}, with versions and every repeat")


if __name__ == "__main__":
    command.run(main, choices=SUITES)
