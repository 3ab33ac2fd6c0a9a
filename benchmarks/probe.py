"""Profiles a module by sampling its main thread: runs it as python -m, or imports a package.

python -m benchmarks.probe FILE MODULE [ARGUMENTS]: writes seconds by part to FILE, in JSON.
"""

import atexit
import importlib.util
import itertools
import json
import pathlib
import runpy
import sys
import threading
import time
import traceback
from collections.abc import Sequence

_INTERVAL = 0.01  # Seconds between samples.
# Parts, and what paths of their frames' files contain. A part that may call another comes after it:
# drawing a figure may compile a program.
_PARTS = {
    "imports": ("<frozen importlib",),
    "compilation": (
        *("jax/_src/compiler.py", "jax/_src/compilation_cache.py", "interpreters/mlir.py"),
        *("interpreters/partial_eval.py", "flax/linen/"),
    ),
    "drawing": ("/matplotlib/", "hypjax/analysis/"),
    "reading": ("/PIL/", "hypjax/data/", "hypjax/galleries/feature_files.py", "/orbax/"),
    "computing": ("",),
}


def main() -> None:
    """Samples the main thread while the module runs."""
    _, output, module, *arguments = sys.argv
    threading.Thread(target=_sample, args=(pathlib.Path(output),), daemon=True).start()
    sys.argv = [module, *arguments]
    if importlib.util.find_spec(module).submodule_search_locations:  # A package.
        importlib.import_module(module)
    else:
        runpy.run_module(module, run_name="__main__", alter_sys=True)


def _sample(output: pathlib.Path) -> None:
    """Adds up the seconds of each part until the process ends; writes often, for ends by signal."""
    seconds = dict.fromkeys(_PARTS, 0.0)
    unfinished = output.with_suffix(".unfinished")

    def write() -> None:
        unfinished.write_text(json.dumps(seconds))
        unfinished.replace(output)

    atexit.register(write)
    thread, before = threading.main_thread().ident, time.perf_counter()
    for count in itertools.count(1):
        time.sleep(_INTERVAL)
        frames = traceback.walk_stack(sys._current_frames()[thread])
        part = _part_of([frame.f_code.co_filename for frame, _ in frames])
        now = time.perf_counter()
        seconds[part], before = seconds[part] + now - before, now
        if count % 10 == 0:
            write()


def _part_of(files: Sequence[str]) -> str:
    """The first part that matches the file of any frame."""
    for part, names in _PARTS.items():
        if any(name in file for name in names for file in files):
            return part
    raise AssertionError("the last part matches all files")


if __name__ == "__main__":
    main()
