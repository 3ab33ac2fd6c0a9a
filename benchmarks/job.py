"""Whole runs from launch to final recall: CUB's recipe on synthetic photos, twice.

The first run starts with empty caches, the second run with the caches that the first has filled.
Both use the command line and report their times in times.json.
"""

import concurrent.futures
import itertools
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from benchmarks import measure
from hypjax.config import load_config
from hypjax.errors import Interrupted, UserError
from hypjax.monitoring.stopwatch import PARTS
from hypjax.runs.files import TIMES
from hypjax.system import console, exits, machine

RUNS = ("cold", "warm")
COLUMNS = {"part": "{part}", **{name: f"{{{name}:.4g}}" for name in RUNS}}
_TOLERANCE = 0.01  # Between the recalls of both runs, since accelerators sum in varying order.
_CONFIG = "cub.py:hyp-dino"
_FIELDS = ("data.name=folder", "model.weights=None", "run.checkpoint_every=50", "run.report=False")
# Classes of each split, images of training and testing, and the photos' longer side.
_SIZE = 100, {"train": 5864, "test": 5924}, 500
_QUICK_SIZE = 6, {"train": 60, "test": 60}, 80
_QUICK_FIELDS = (
    *("data.image_size=32", "data.resize=36", "model.architecture=vit", "model.patch_size=8"),
    *("model.width=32", "model.depth=2", "model.num_heads=2", "train.batch_size=54"),
    *("train.total_steps=8", "run.workers=0", "run.checkpoint_every=4"),
)


def rows(options: measure.Options) -> measure.Rows:
    """Writes photos, and trains on them twice by the command line; on few photos if quick.

    A row holds a part of times.json, or another measurement, for both runs.

    Raises:
        UserError: The machine is too slow, or a run failed.
        Interrupted: The user interrupted the runs.
    """
    if not options.quick and not machine.has_accelerator():
        raise UserError("JAX finds no accelerator, and both runs would take days; try --quick")
    (classes, counts, width), quick = (_QUICK_SIZE, _QUICK_FIELDS) if options.quick else (_SIZE, ())
    with (
        tempfile.TemporaryDirectory(prefix="hypjax-job-") as temporary,
        exits.deferred("interrupted: ending the run") as interrupted,
    ):
        folder = pathlib.Path(temporary)
        fields = [*_FIELDS, *quick, f"data.path={folder / 'photos'}", f"run.cache={options.cache}"]
        fields += options.overrides
        load_config(_CONFIG, fields)  # Reports invalid fields before any work is done.
        console.say(f"writing {sum(counts.values())} photos to {folder}")
        with concurrent.futures.ThreadPoolExecutor(machine.usable_cores()) as pool:
            futures = [
                pool.submit(
                    write_photos,
                    folder / f"photos/{split}/{split}_{label:03}",
                    width,
                    count=len(range(label, counts[split], classes)),
                    seed=[split == "test", label],
                )
                for split, label in itertools.product(counts, range(classes))
            ]
            for future in futures:
                future.result()
        figures = {name: _run(folder, name, fields, interrupted) for name in RUNS}
    return [
        {"part": part, **{name: figures[name][part] for name in RUNS}} for part in figures["cold"]
    ]


def conclude(rows: measure.Rows, output: pathlib.Path) -> None:
    """Warns if the final recalls differ."""
    del output
    if max(rows[-1][name] for name in RUNS) - min(rows[-1][name] for name in RUNS) > _TOLERANCE:
        console.warn(f"the final recalls of the runs differ by more than {_TOLERANCE}")


def write_photos(folder: pathlib.Path, width: int, count: int, seed: Sequence[int]) -> None:
    """Writes JPEG files of about the size of photos: crops of one random scene."""
    folder.mkdir(parents=True)
    rng, side = np.random.default_rng(seed), width * 3 // 2
    pixels = scene(rng, 36, side)
    for i in range(count):
        shape = int(width * rng.uniform(0.65, 0.85)), width
        if i % 5 == 0:  # Portrait format.
            shape = shape[::-1]
        top, left = rng.integers(0, side - width + 1, 2)
        photo = Image.fromarray(pixels[top : top + shape[0], left : left + shape[1]])
        photo.save(folder / f"{i:03}.jpg", quality=90)


def scene(rng: np.random.Generator, spots: int, side: int) -> UInt8[np.ndarray, "side side 3"]:
    """An image of smooth colour spots with grain, which JPEG compresses like a photo."""
    coarse = Image.fromarray(rng.integers(0, 256, (spots, spots, 3), np.uint8))
    smooth = np.asarray(coarse.resize((side, side), Image.Resampling.BICUBIC), np.int16)
    grain = rng.normal(0, 12, smooth.shape).astype(np.int16)
    return np.clip(smooth + grain, 0, 255).astype(np.uint8)


def _run(
    folder: pathlib.Path, name: str, fields: Sequence[str], interrupted: Callable[[], int]
) -> dict[str, Any]:
    """Trains by the command line in a new folder, with caches that both runs share."""
    console.say(f"the {name} run")
    workdir = folder / name
    command = [sys.executable, "-m", "hypjax.main", f"--config={_CONFIG}", f"--workdir={workdir}"]
    command += [f"--config.{field}" for field in fields]
    environment = os.environ | {"XDG_CACHE_HOME": str(folder / "caches")}
    # A killed run leaves semaphores behind, about which Python would warn.
    environment["PYTHONWARNINGS"] = "ignore:resource_tracker"
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    started = time.monotonic()
    # A separate process group: Ctrl-C must not reach the run, which would save its state.
    options = dict(env=environment, stdout=subprocess.DEVNULL, process_group=0)
    with subprocess.Popen(command, **options) as process:
        while process.poll() is None and not interrupted():
            time.sleep(0.1)
        if process.returncode is None:
            process.kill()
            os.killpg(process.pid, signal.SIGTERM)  # Its workers would print tracebacks.
    seconds = time.monotonic() - started
    if interrupted():
        raise Interrupted("the photos and runs were removed", interrupted())
    if process.returncode:
        raise UserError(f"the {name} run failed with status {process.returncode}; see above")
    times = json.loads((workdir / TIMES).read_text())
    results = json.loads((workdir / "results.json").read_text())
    peaks = {part: times.get(f"{part}_memory_peak") for part in ("host", "device")}
    return {
        **{f"{part}, s": times["seconds"][part] for part in (*PARTS, "total")},
        "whole process, s": seconds,
        **{f"{part} memory, peak, GB": peak and peak / 1e9 for part, peak in peaks.items()},
        "final recall@1 of the head": results["final"]["head"]["recall@1"],
    }
